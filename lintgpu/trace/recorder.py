"""The dispatch mode that runs a model on meta, answers questions about known values, and notes every op."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lintgpu.trace import gemms, oracle, shapes
from lintgpu.trace.events import Event, Place, Replay
from lintgpu.trace.kinds import OpPlan, dtype_name, footprint, plan, traffic
from lintgpu.trace.modules import ModuleStack, Sites
from lintgpu.trace.records import BACKWARD, FORWARD, GRAD_INPUT, GRAD_WEIGHT, Attention
from lintgpu.trace.shadow import MAX_BYTES, Shadows, storage_id
from lintgpu.trace.shapes import META
from lintgpu.trace.weights import Weights, traced_numbers

CPU = torch.device("cpu")
aten = torch.ops.aten

# Their twin would be noise; control flow that asks for a single draw gets the mean instead (see _draw).
_UNKNOWN = frozenset(
    [
        "empty", "empty_strided", "new_empty", "new_empty_strided", "empty_like", "rand", "randn", "bernoulli", "bernoulli_",
        "uniform_", "normal_", "normal", "rand_like", "randn_like", "randint", "randint_like", "multinomial", "exponential_", "random_",
        "native_dropout", "set_", "resize_",
    ]
)  # fmt: skip
_MAX_DRAWS = 64


class Node:
    """What is known of an autograd node: the place of its forward op and the GEMMs that it ran."""

    __slots__ = ("assumed", "gemms", "own", "place")

    def __init__(self, place: Place, own: bool = False) -> None:
        """`own` says that no other node shares this object."""
        self.place = place
        self.own = own
        self.assumed = False
        self.gemms: list[gemms.ForwardGemm] = []


class Recorder(TorchDispatchMode):  # type: ignore[misc]
    """Notes every op that reaches the dispatcher. Enter it around the forward and the backward pass."""

    def __init__(self, modules: ModuleStack, weights: Weights, sites: Sites) -> None:
        """`modules` says what is running, `weights` what is a weight."""
        super().__init__()
        self.modules = modules
        self.weights = weights
        self.sites = sites
        self.shadows = Shadows()
        self.classes = oracle.Classes()
        self.items: list[Event | Replay] = []
        self.assumptions: dict[str, None] = {}
        self.token_sizes: frozenset[int] = frozenset()
        self.tainted: dict[int, Any] = {}
        self.quiet = False
        self._nodes: dict[int, Node] = {}
        self._last_node = -1
        modules.on_exit = self._claim_nodes
        self._numbers: dict[int, dict[int, str]] = {}

    # -- the way of one op

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False keeps torch from wrapping the mode, which would import torch._dynamo (seconds) for nothing."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one op on meta and note it."""
        with torch._C.DisableTorchFunction():
            return self._op(func, args, kwargs or {})

    def _op(self, func: Any, args: Any, kwargs: Any) -> Any:
        node = torch._C._current_autograd_node()
        if node is None:
            self._claim_nodes()
        info = plan(func)
        if func is aten._local_scalar_dense.default:
            return self.scalar(args[0])
        args, kwargs, inputs, on_meta = self._to_meta(info, args, kwargs)
        if not on_meta:
            return func(*args, **kwargs)
        known = all(self.shadows.knows(tensor) for tensor in inputs)
        special = self._data_dependent(info, func, args, kwargs, known)
        output = special if special is not None else self._run(info, func, args, kwargs)
        outputs = _tensors_of(output)
        if special is None and not info.is_view:
            self._update_values(info, func, args, kwargs, inputs, outputs, known)
        self.classes.note(info.name, args, output)
        if node is None:
            assumed = self._taint(info, inputs, outputs, fresh=special is not None and not known)
        else:
            differentiated = self._node_of(node)
            assumed = differentiated is not None and differentiated.assumed
        if not self.quiet:
            self._note(info, node, args, inputs, output, outputs, assumed)
        return output

    def _to_meta(self, info: OpPlan, args: Any, kwargs: Any) -> tuple[Any, Any, list[torch.Tensor], bool]:
        """(args, kwargs, tensor inputs, whether the op runs on meta) with stray CPU tensors lifted and devices replaced."""
        inputs = _inputs_of(args, kwargs)
        meta = any(tensor.is_meta for tensor in inputs)
        if info.has_device and (meta or not inputs or _wants_meta(kwargs)):
            kwargs = {**kwargs, "device": META}
            kwargs.pop("pin_memory", None)
            meta = True
        if meta and any(not tensor.is_meta and tensor.dim() for tensor in inputs) and len(inputs) > 0:
            lifted: dict[int, torch.Tensor] = {}
            args = _replace(args, lambda tensor: self._lift(tensor, lifted))
            kwargs = {key: _replace(value, lambda tensor: self._lift(tensor, lifted)) for key, value in kwargs.items()}
            inputs = _inputs_of(args, kwargs)
        return args, kwargs, inputs, meta

    def _lift(self, tensor: torch.Tensor, lifted: dict[int, torch.Tensor]) -> torch.Tensor:
        if tensor.is_meta or not tensor.dim():
            return tensor
        if id(tensor) not in lifted:
            lifted[id(tensor)] = self.shadows.lift(tensor)
        return lifted[id(tensor)]

    def _run(self, info: OpPlan, func: Any, args: Any, kwargs: Any) -> Any:
        output = shapes.output_of(info.name, info.is_elementwise, args, kwargs)
        if output is not NotImplemented:
            return output
        try:
            return shapes.by_torch(func, args, kwargs)
        except NotImplementedError:
            return self._opaque(info, func, _inputs_of(args, kwargs))

    def _opaque(self, info: OpPlan, func: Any, inputs: list[torch.Tensor]) -> Any:
        """Outputs for an op without a meta kernel: each tensor like the first input."""
        if not inputs:
            raise
        self.assume(f"{info.name} has no meta kernel: each of its outputs was taken to be like its first input")
        returns = func._schema.returns
        outputs = [torch.empty_like(inputs[0]) if "Tensor" in str(item.type) else None for item in returns]
        return outputs[0] if len(outputs) == 1 else tuple(outputs) if outputs else None

    # -- values

    def restart(self) -> None:
        """Ready for a step: forget what ran; values and weights stay known."""
        self.shadows.max_float_bytes = MAX_BYTES
        self.items = []
        self.assumptions = {}
        self.tainted = {}
        self._nodes = {}

    def scalar(self, tensor: torch.Tensor) -> Any:
        """The answer to `.item()`."""
        value = self.shadows.value(tensor)
        if value is not None:
            return value.item()
        self.assume(f"a value that depends on weights or data was taken to be {oracle.scalar(tensor)}")
        return oracle.scalar(tensor)

    def assume(self, text: str) -> None:
        """Remember an assumption, with the place that asked for it."""
        site = self.sites.caller()
        place = f" ({site.path.rpartition('/')[2]}:{site.line})" if site is not None else ""
        self.assumptions.setdefault(text + place)

    def _data_dependent(self, info: OpPlan, func: Any, args: Any, kwargs: Any, known: bool) -> Any:
        """The output of an op whose shape depends on values; None for any other op."""
        if info.name == "repeat_interleave" and (len(args) != 1 or not isinstance(args[0], torch.Tensor)):
            return None
        masked = info.name == "index" and any(
            isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if info.name not in oracle.SHAPE_DEPENDENT and not masked:
            return None
        if known:
            value = func(*self._values(args), **self._values(kwargs))
            return _map(value, self.shadows.lift)
        if masked:
            sizes = self._known_mask(args)
            if sizes is not None:
                return func(*sizes)
            self.assume("a mask that depends on weights or data was taken to select " + self._share(args[1]))
            return func(*oracle.index_all(args, self.classes))
        self.assume(f"{info.name} of values that depend on weights or data was taken to give {self._share(args[:2])}")
        return oracle.shape_of(info.name, args, kwargs, self.classes)

    def _known_mask(self, args: Any) -> Any:
        """The arguments of aten::index with known masks replaced by their indices, or None where one is unknown."""
        indices: list[Any] = []
        for index in args[1]:
            if not isinstance(index, torch.Tensor) or index.dtype not in (torch.bool, torch.uint8):
                indices.append(index)
                continue
            value = self.shadows.value(index)
            if value is None:
                return None
            indices += [self.shadows.lift(part) for part in value.nonzero(as_tuple=True)]
        return [args[0], indices, *args[2:]]

    def _share(self, tensors: Any) -> str:
        shares = [self.classes.share_of(tensor) for tensor in tensors if isinstance(tensor, torch.Tensor)]
        return f"an even share, one in {max(shares)}" if max(shares, default=1) > 1 else "everything"

    def _values(self, tree: Any) -> Any:
        """`tree` with every meta tensor replaced by its known value and devices by the CPU."""
        if isinstance(tree, torch.Tensor):
            return self.shadows.value(tree)
        if isinstance(tree, torch.device):
            return CPU
        if isinstance(tree, (list, tuple)):
            return [self._values(item) for item in tree]
        if isinstance(tree, dict):
            return {key: self._values(value) for key, value in tree.items()}
        return tree

    def _update_values(
        self, info: OpPlan, func: Any, args: Any, kwargs: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor], known: bool
    ) -> None:
        """Keep the twins of outputs and of written arguments right."""
        written = [args[i] for i in info.written if i < len(args)] + [kwargs[name] for name in info.written_names if name in kwargs]
        written = [tensor for tensor in _inputs_of(written, {}) if tensor.is_meta]
        if info.name in _UNKNOWN:
            self._draw(info, args, kwargs, written or outputs)
            return
        if written:
            overwrites = info.name in ("fill_", "zero_", "copy_") and all(self.shadows.knows(tensor) for tensor in inputs[1:])
            known = known or (overwrites and all(self.shadows.knows(tensor) or self.shadows.start(tensor) for tensor in written))
            if not known or not self._evaluate(func, args, kwargs):
                for tensor in written:
                    self.shadows.forget(tensor)
            return
        if known and all(self.shadows.wants(tensor.shape, tensor.dtype) for tensor in outputs):
            values = self._evaluate(func, args, kwargs)
            for tensor, value in zip(outputs, values, strict=False):
                if tensor.shape == value.shape and tensor.dtype == value.dtype:
                    self.shadows.attach(tensor, value)

    def _evaluate(self, func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
        """Run the op on the known values; nothing where the CPU cannot."""
        try:
            return _tensors_of(func(*self._values(args), **self._values(kwargs)))
        except Exception:
            return []

    def _draw(self, info: OpPlan, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> None:
        """A few random numbers in [0, 1) are taken at their mean, so that layer drop and the like keep every layer."""
        for tensor in tensors:
            self.shadows.forget(tensor)
            mean = info.name in ("rand", "rand_like", "uniform_") and tensor.numel() <= _MAX_DRAWS
            if mean and self.shadows.start(tensor):
                value = self.shadows.value(tensor)
                if value is not None:
                    value.fill_(0.5)

    def _taint(self, info: OpPlan, inputs: list[torch.Tensor], outputs: list[torch.Tensor], fresh: bool) -> bool:
        """Whether the shape of the op rests on an oracle's answer; follows such shapes."""
        if not self.tainted and not fresh:
            return False
        sick = fresh or any(storage_id(tensor) in self.tainted for tensor in inputs)
        healthy = {tensor.shape for tensor in inputs if storage_id(tensor) not in self.tainted}
        if sick:
            for tensor in outputs:
                if fresh or (tensor.shape not in healthy and not info.written):
                    self.tainted[storage_id(tensor)] = tensor.untyped_storage()
        return sick

    # -- places

    def _claim_nodes(self) -> None:
        """Autograd nodes made since the last op belong to the module that is running now."""
        if self.quiet:
            return
        last = torch.autograd._get_sequence_nr()
        if last != self._last_node:
            if last > self._last_node >= 0:
                node = Node(self._place())
                for number in range(self._last_node, last):
                    self._nodes[number] = node
            self._last_node = last

    def _place(self) -> Place:
        module = self.modules.current
        site = self.sites.caller()
        if module is None:
            return Place(call_site=site)
        return Place(self.modules.path(module), type(module).__name__, site, self.modules.site(module))

    def _node_of(self, node: Any) -> Node | None:
        return None if node is None else self._nodes.get(node._sequence_nr())

    # -- notes

    def _note(
        self, info: OpPlan, node: Any, args: Any, inputs: list[torch.Tensor], output: Any, outputs: list[torch.Tensor], assumed: bool
    ) -> None:
        known = self._node_of(node)
        if (
            node is not None
            and info.name in ("add", "clone", "copy_", "detach", "new_empty_strided")
            and self._is_engines(info, node, inputs)
        ):
            return self._note_accumulation(info, inputs, outputs)
        place = known.place if known is not None else self._place() if node is None else Place()
        read, written = traffic(info.name, info.kind, inputs, outputs)
        dtype = dtype_name(outputs[0].dtype if outputs else inputs[0].dtype if inputs else torch.get_default_dtype())
        event = Event(
            kind=info.kind,
            name=info.name,
            phase=FORWARD if node is None else BACKWARD,
            dtype=dtype,
            bytes_read=read,
            bytes_written=written,
            place=place,
            shape=tuple(outputs[0].shape) if outputs else (),
            assumed=assumed,
        )
        if info.name in gemms.READERS:
            event = self._gemm(event, gemms.READERS[info.name](args, output), known, node is not None, inputs)
        elif info.name in ("convolution", "convolution_backward", "convolution_overrideable", "convolution_backward_overrideable"):
            self.items.extend(self._convolution(event, args, output, known))
            return None
        self.items.append(event)
        if node is None:
            self.weights.derive(inputs, outputs)
            own = self._own_node() if assumed else None
            if own is not None:
                own.assumed = True
        return None

    def _is_engines(self, info: OpPlan, node: Any, inputs: list[torch.Tensor]) -> bool:
        """Whether the autograd engine itself runs the op: it sums gradients of a tensor used twice, or stores a leaf's."""
        if node.name() == "torch::autograd::AccumulateGrad":
            return True
        return info.name == "add" and len(inputs) == 2 and inputs[0].shape == inputs[1].shape

    def _note_accumulation(self, info: OpPlan, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """Sums of gradients belong to no module: which of the summands arrives last is the engine's choice."""
        if info.name != "add":
            return
        read, written = traffic(info.name, info.kind, inputs, outputs)
        shape = tuple(outputs[0].shape)
        self.items.append(Event("pointwise", "add", BACKWARD, dtype_name(outputs[0].dtype), read, written, Place(), shape))

    def note_attention(self, attention: Attention, phase: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """Called by the attention override."""
        self._note_whole("attention", "scaled_dot_product_attention", phase, inputs, outputs, attention)

    def note_kernel(self, name: str, phase: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor], kind: str = "opaque") -> None:
        """Called for a kernel that torch's dispatcher does not see: all that is known of it is what it reads and writes."""
        self._note_whole(kind, name, phase, inputs, outputs)

    def _note_whole(
        self, kind: str, name: str, phase: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor], attention: Attention | None = None
    ) -> None:
        if self.quiet:
            return
        node = self._node_of(torch._C._current_autograd_node()) if phase == BACKWARD else None
        if phase == FORWARD:
            self._claim_nodes()
        assumed = node.assumed if node is not None else any(storage_id(tensor) in self.tainted for tensor in inputs)
        own = self._own_node() if assumed and phase == FORWARD else None
        if own is not None:
            own.assumed = True
        place = node.place if node is not None else self._place()
        self.items.append(
            Event(
                kind=kind,
                name=name,
                phase=phase,
                dtype=dtype_name((inputs or outputs)[0].dtype),
                bytes_read=sum(footprint(tensor) for tensor in inputs),
                bytes_written=sum(footprint(tensor) for tensor in outputs),
                place=place,
                shape=tuple(outputs[0].shape) if outputs else (),
                attention=attention,
                assumed=assumed,
            )
        )

    def attention_origins(self, attention: Attention) -> tuple[tuple[str, str], ...]:
        """The expressions behind the head counts and sizes, from numbers that the running modules keep."""
        numbers = self._module_numbers()
        dims = {"heads": attention.heads, "kv_heads": attention.kv_heads, "head_dim": attention.head_dim, "value_dim": attention.value_dim}
        return tuple((name, numbers[size]) for name, size in dims.items() if size in numbers)

    def _gemm(self, event: Event, operands: gemms.Operands, known: Node | None, backward: bool, inputs: list[torch.Tensor]) -> Event:
        origins = self._operand_origins(operands)
        phase = FORWARD
        if backward:
            weight, names = self._match_forward(known, operands)
            phase = GRAD_WEIGHT if weight else GRAD_INPUT
            origins = (names[0] or origins[0], names[1] or origins[1], names[2] or origins[2])
        elif torch.is_tensor(operands.output):
            self._remember(operands, origins)
        named = tuple((dim, origin) for dim, origin in zip(("m", "n", "k"), origins, strict=True) if origin is not None)
        record = gemms.gemm_of(operands, named)
        if operands.groups:
            self.assumptions.setdefault("tokens are split evenly over the groups of a grouped GEMM (the experts)")
        weight_dtype = operands.weight_dtype or dtype_name(operands.b.dtype)
        return replace(
            event,
            kind="gemm",
            phase=phase,
            dtype=dtype_name(operands.a.dtype),
            gemm=replace(record, weight_dtype=weight_dtype) if weight_dtype != dtype_name(operands.a.dtype) else record,
        )

    def _match_forward(self, known: Node | None, operands: gemms.Operands) -> tuple[bool, gemms.Names]:
        """Whether a backward GEMM computes the gradient of a weight, and where its dims came from."""
        for forward in reversed(known.gemms if known is not None else []):
            weight, names = gemms.backward_dims(forward, operands)
            if weight is not None:
                return weight, names
        uses_weight = self.weights.holds(operands.a) or self.weights.holds(operands.b)
        differentiates_weight = known is not None and any(forward.a_is_weight or forward.b_is_weight for forward in known.gemms)
        return differentiates_weight and not uses_weight, (None, None, None)

    def _remember(self, operands: gemms.Operands, origins: gemms.Names) -> None:
        node = self._own_node()
        if node is not None:
            node.gemms.append(
                gemms.ForwardGemm(
                    storage_id(operands.a),
                    storage_id(operands.b),
                    self.weights.holds(operands.a),
                    self.weights.holds(operands.b),
                    *origins,
                    (operands.m, operands.n, operands.k),
                )
            )

    def _own_node(self) -> Node | None:
        """The Node of the op that just ran, apart from those made with it; None where it needs no gradient."""
        number = torch.autograd._get_sequence_nr() - 1
        node = self._nodes.get(number)
        if node is not None and not node.own:
            node = self._nodes[number] = Node(node.place, own=True)
        return node

    def _operand_origins(self, operands: gemms.Operands) -> gemms.Names:
        """The expressions behind m, n and k: from a weight operand's dims, else from numbers that the running modules keep."""
        a, b = self.weights.origins(operands.a), self.weights.origins(operands.b)
        m, k_of_a = (a[-2], a[-1]) if len(a) > 1 else (None, a[-1])
        k_of_b, n = (b[-2], b[-1]) if len(b) > 1 else (b[-1], None)
        k = k_of_b or k_of_a
        if operands.groups:
            m = None if operands.groups == "M" else m
        if operands.a.dim() < 3 or operands.groups:
            return m, n, k
        numbers = self._module_numbers()
        return m, n or numbers.get(operands.n), k or numbers.get(operands.k)

    def _module_numbers(self) -> dict[int, str]:
        """Traced ints kept by the running module and the two around it, but for sizes that tokens have too."""
        stack = self.modules.stack[-3:]
        if not stack:
            return {}
        key = id(stack[-1])
        if key not in self._numbers:
            merged: dict[int, str] = {}
            for module in stack:
                merged.update(traced_numbers(module))
            self._numbers[key] = {size: origin for size, origin in merged.items() if size not in self.token_sizes}
        return self._numbers[key]

    def _convolution(self, event: Event, args: Any, output: Any, known: Node | None) -> Iterator[Event]:
        if event.name.startswith("convolution_backward"):
            yield from self._convolution_backward(event, args, output)
            return
        input_, weight, bias, stride, transposed, groups = args[0], args[1], args[2], args[3], args[6], args[8]
        conv = gemms.conv_of(input_, weight, output.shape, stride, groups, transposed)
        record = gemms.conv_gemms(conv, bias is not None, self._channel_origins(weight, transposed))["forward"]
        yield replace(event, kind="conv", dtype=dtype_name(input_.dtype), gemm=record, conv=conv)

    def _convolution_backward(self, event: Event, args: Any, output: Any) -> Iterator[Event]:
        gradient, input_, weight, stride, transposed, groups, mask = args[0], args[1], args[2], args[4], args[7], args[9], args[10]
        conv = gemms.conv_of(input_, weight, gradient.shape, stride, groups, transposed)
        records = gemms.conv_gemms(conv, False, self._channel_origins(weight, transposed))
        for wanted, phase, operand, result in ((mask[0], GRAD_INPUT, weight, output[0]), (mask[1], GRAD_WEIGHT, input_, output[1])):
            if wanted:
                yield replace(
                    event,
                    kind="conv",
                    phase=phase,
                    dtype=dtype_name(gradient.dtype),
                    gemm=records[phase],
                    conv=conv,
                    bytes_read=footprint(gradient) + footprint(operand),
                    bytes_written=footprint(result),
                    shape=tuple(result.shape),
                )
        if mask[2]:
            size = footprint(output[2])
            yield replace(event, kind="reduction", bytes_read=footprint(gradient), bytes_written=size, shape=tuple(output[2].shape))

    def _channel_origins(self, weight: torch.Tensor, transposed: bool) -> tuple[str | None, str | None]:
        origins = self.weights.origins(weight)
        return (origins[1], origins[0]) if transposed else (origins[0], origins[1])

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Run ops without noting them."""
        before, self.quiet = self.quiet, True
        try:
            yield
        finally:
            self.quiet = before


def _wants_meta(kwargs: Any) -> bool:
    device = kwargs.get("device")
    return device is not None and torch.device(device).type != "cpu"


def _inputs_of(args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors among the arguments, lists of tensors included."""
    found: list[torch.Tensor] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(item for item in value if isinstance(item, torch.Tensor))
    return found


def _tensors_of(output: Any) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output]
    return _inputs_of(output, {}) if isinstance(output, (list, tuple)) else []


def _replace(tree: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, (list, tuple)):
        return type(tree)(_replace(item, change) for item in tree)
    return tree


_map = _replace
