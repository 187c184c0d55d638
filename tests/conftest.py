"""Settings that hold for all tests."""

from hypothesis import HealthCheck, settings

# Test machines are shared and slow at times; how long an example takes says nothing about what it tests.
settings.register_profile("lintgpu", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("lintgpu")
