import pytest
from tiny import DEVICE

pytest.register_assert_rewrite("engine_contract")


@pytest.fixture(params=["slots", "paged"])
def core(request: pytest.FixtureRequest) -> str:
    """Both cores promise the same, the paged one on a CPU too, where plain torch stands in for its kernels."""
    name: str = request.param
    if name == "paged" and DEVICE.type == "cuda":
        pytest.skip("the kernels need heads of 32 and more: tests/kernels")
    return name
