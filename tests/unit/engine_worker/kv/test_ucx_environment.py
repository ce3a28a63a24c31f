"""UCX is loaded in one place, with its settings, and only when an agent starts."""

import subprocess
import sys

import pytest

from engine_worker.kv.settings import GATHERED_BYTES, Device, KvTransferSettings
from engine_worker.kv.ucx_environment import load_ucx, ucx_environment
from mesh.errors import ConfigurationError


def test_without_ucx_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ucxx", None)
    with pytest.raises(ConfigurationError, match="pip install ucxx-cu13"):
        load_ucx("cpu", {})


def test_the_operators_own_settings_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ucxx", None)
    environ = {"UCX_TLS": "tcp"}
    with pytest.raises(ConfigurationError):
        load_ucx("cpu", environ)
    assert environ["UCX_TLS"] == "tcp"
    assert environ["UCX_POSIX_ERROR_HANDLING"] == "y"


def test_a_gpu_has_its_transports() -> None:
    assert "cuda" in ucx_environment("cuda", has_rdma=False)["UCX_TLS"]
    assert "cuda" not in ucx_environment("cpu", has_rdma=False)["UCX_TLS"]


def test_rdma_is_on_where_there_is_a_card_and_shared_memory_everywhere() -> None:
    with_cards, without = (
        ucx_environment("cpu", has_rdma=has_rdma)["UCX_TLS"].split(",") for has_rdma in (True, False)
    )
    assert set(with_cards) - set(without) == {"rc", "dc"}
    assert {"posix", "sysv", "tcp", "self"} <= set(without)


@pytest.mark.process
def test_importing_the_agent_does_not_import_ucx() -> None:
    code = (
        "import sys; import engine_worker.kv.agent, engine_worker.kv.service;"
        "sys.exit('ucxx' in sys.modules or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=30).returncode == 0


@pytest.mark.parametrize("device", GATHERED_BYTES)
def test_what_a_device_gathers_by_default_goes_with_the_other_defaults(device: Device) -> None:
    assert KvTransferSettings(device=device, gathered_bytes=GATHERED_BYTES[device]).message_bytes == 4 * 2**20


@pytest.mark.parametrize(
    "wrong",
    [
        {"parallel_transfers": 0},
        {"direct_bytes": 1024, "gathered_bytes": 512},
        {"gathered_bytes": 8 * 2**20},
        {"queued_transfers": -1},
        {"grace_s": 0.0},
    ],
)
def test_settings_that_contradict_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError):
        KvTransferSettings(**wrong)  # type: ignore[arg-type]
