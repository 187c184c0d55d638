"""Settings that hold for all tests."""

import pytest
from hypothesis import HealthCheck, settings

# Test machines are shared and slow at times; how long an example takes says nothing about what it tests.
settings.register_profile("lintgpu", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("lintgpu")


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No test sees what another has kept, nor what the user has."""
    monkeypatch.setenv("LINTGPU_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
