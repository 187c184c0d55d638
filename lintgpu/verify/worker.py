"""The process that measures: it imports torch, runs jobs on the GPU and answers in JSON lines.

The parent (lintgpu.verify.client) writes one JSON object a line: first {"device": "0", "project_root": ...}, then jobs. The answers
to a job are any number of {"progress": text} lines and one {"result": ...}. As in lintgpu.trace.worker the protocol runs over
private copies of stdin and stdout, so that nothing a model prints can mix with it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from lintgpu.trace.worker import missing_torch, take_over_stdio
from lintgpu.verify.records import Device, Failure, Job, LayersJob, NumbersJob, Result, StepsJob, from_json, to_json


def main() -> int:
    """Serve jobs until stdin ends."""
    requests, replies = take_over_stdio()

    def send(message: Mapping[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    configuration = json.loads(requests.readline())
    if configuration["project_root"] is not None:
        sys.path.insert(0, configuration["project_root"])
    send({"progress": "importing torch"})
    missing = missing_torch()
    if missing is not None:
        send({"hello": to_json(Failure(f"{missing.reason} ({missing.hint})"))})
        return 0
    bench = _Workbench(configuration["device"])
    hello = bench.hello()
    send({"hello": to_json(hello)})
    if isinstance(hello, Failure):
        return 0
    try:
        for line in requests:
            request = json.loads(line)
            result = bench.run(from_json(request["job"]), request["seconds"], lambda text: send({"progress": text}))
            send({"result": to_json(result), "slowed": bench.slowed()})
    finally:
        bench.close()
    return 0


class _Workbench:
    """The device and what is kept on it from job to job."""

    def __init__(self, wanted: str) -> None:
        self._wanted = wanted
        self._models: Any = None

    def hello(self) -> Device | Failure:
        from lintgpu.verify import device as devices

        try:
            self._device = devices.choose(self._wanted)
            described = devices.describe(self._device)
        except devices.NoDevice as error:
            return Failure(str(error))
        from lintgpu.verify.models import Models

        self._models = Models(self._device)
        self._watch = devices.Watch(self._device)
        return described

    def slowed(self) -> str:
        """Why the card ran below its clocks during the last job; empty where it did not."""
        return self._watch.slowed()

    def close(self) -> None:
        """Stop watching the card."""
        self._watch.close()

    def run(self, job: Job, seconds: float, progress: Callable[[str], None]) -> Result:
        """The result of a job; whatever goes wrong is a Failure with its reason. Never raises but KeyboardInterrupt."""
        import torch

        from lintgpu.verify import layers, numbers, steps
        from lintgpu.verify.models import reason_of

        deadline = time.monotonic() + seconds
        try:
            if isinstance(job, LayersJob):
                return layers.measure(job, self._device, deadline, progress)
            if isinstance(job, StepsJob):
                return steps.measure(job, self._models, deadline, progress)
            assert isinstance(job, NumbersJob)
            return numbers.measure(job, self._models, progress)
        except KeyboardInterrupt:
            raise
        except torch.OutOfMemoryError:
            failure = Failure("the GPU ran out of memory")
        except BaseException as error:  # Model code may raise anything, SystemExit included.
            failure = Failure(reason_of(error))
        # Outside the handler, where the traceback no longer holds the tensors.
        self._models.clear()
        return failure


if __name__ == "__main__":
    sys.exit(main())
