"""GPUs as the vendors' tools describe them, from what such tools print."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from corral.cluster.doctor.findings import Finding
from corral.cluster.doctor.machine_checks import TorchFacts, check_gpus, check_num_gpus, check_torch, describe_models
from corral.cluster.doctor.torch_probe import has_code
from corral.cluster.node_processes import NodeProcess
from corral.cluster.node_report import Gpu, GpuInventory, GpuProcess, parse_nvidia, parse_rocm, query_gpus

GIB = 2**30
NVIDIA = """\
<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log>
	<timestamp>Sat Nov 14 10:15:32 2026</timestamp>
	<driver_version>550.54.15</driver_version>
	<cuda_version>12.4</cuda_version>
	<attached_gpus>2</attached_gpus>
	<gpu id="00000000:18:00.0">
		<product_name>NVIDIA H100 80GB HBM3</product_name>
		<mig_mode>
			<current_mig>Disabled</current_mig>
			<pending_mig>Disabled</pending_mig>
		</mig_mode>
		<uuid>GPU-8a56a4bc-e6a9-4a4c-a1c4-5a3f1d2f7b10</uuid>
		<minor_number>0</minor_number>
		<gpu_recovery_action>None</gpu_recovery_action>
		<fb_memory_usage>
			<total>81559 MiB</total>
			<reserved>551 MiB</reserved>
			<used>40962 MiB</used>
			<free>40046 MiB</free>
		</fb_memory_usage>
		<compute_mode>Default</compute_mode>
		<ecc_errors>
			<volatile>
				<sram_correctable>0</sram_correctable>
				<sram_uncorrectable_parity>0</sram_uncorrectable_parity>
				<dram_uncorrectable>0</dram_uncorrectable>
			</volatile>
		</ecc_errors>
		<processes>
			<process_info>
				<gpu_instance_id>N/A</gpu_instance_id>
				<compute_instance_id>N/A</compute_instance_id>
				<pid>4711</pid>
				<type>C</type>
				<process_name>python</process_name>
				<used_memory>40402 MiB</used_memory>
			</process_info>
			<process_info>
				<pid>9</pid>
				<type>G</type>
				<process_name>/usr/lib/xorg/Xorg</process_name>
				<used_memory>4 MiB</used_memory>
			</process_info>
		</processes>
	</gpu>
	<gpu id="00000000:2A:00.0">
		<product_name>NVIDIA H100 80GB HBM3</product_name>
		<mig_mode>
			<current_mig>Enabled</current_mig>
			<pending_mig>Enabled</pending_mig>
		</mig_mode>
		<uuid>GPU-1c2d3e4f-0000-1111-2222-333344445555</uuid>
		<minor_number>1</minor_number>
		<fb_memory_usage>
			<total>81559 MiB</total>
			<used>551 MiB</used>
			<free>81008 MiB</free>
		</fb_memory_usage>
		<compute_mode>Exclusive_Process</compute_mode>
		<ecc_errors>
			<volatile>
				<dram_uncorrectable>3</dram_uncorrectable>
			</volatile>
		</ecc_errors>
		<processes>
		</processes>
	</gpu>
</nvidia_smi_log>
"""
ROCM = """\
{"card0": {"VRAM Total Memory (B)": "68702699520", "VRAM Total Used Memory (B)": "30000000000", \
"Card Series": "AMD Instinct MI250X", "Card Vendor": "Advanced Micro Devices, Inc."}, \
"card1": {"VRAM Total Memory (B)": "68702699520", "VRAM Total Used Memory (B)": "10854400", \
"Card Series": "AMD Instinct MI250X"}, \
"system": {"Driver version": "6.8.5", "PID4711": "python, 1, 29900000000, 0, unknown"}}
"""
NO_DRIVER = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA "
    "driver is installed and running."
)
MISMATCH = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 550.54"
TORCH = TorchFacts(version="2.13.0+cu124", cuda="12.4", available=True, num_devices=2)
TOOLS = GpuInventory("nvidia", "550.54.15", "12.4", (Gpu(0, "H100", 80 * GIB, GIB // 2, ()),))


def test_what_nvidia_smi_prints_is_read() -> None:
    found = parse_nvidia(NVIDIA)
    assert (found.driver, found.runtime, found.error) == ("550.54.15", "12.4", "")
    first, second = found.gpus
    assert first.total == 81559 * 2**20
    assert first.processes == (GpuProcess(4711, 40402 * 2**20),)
    assert [first.is_broken, first.is_exclusive, first.is_split] == ["", False, False]
    assert second.is_broken == "3 uncorrected memory errors"
    assert second.is_exclusive
    assert second.is_split
    assert describe_models(found.gpus) == "2 x NVIDIA H100 80GB HBM3"


def test_what_rocm_smi_prints_is_read() -> None:
    found = parse_rocm(ROCM)
    assert (found.vendor, found.driver, len(found.gpus)) == ("amd", "6.8.5", 2)
    assert found.gpus[1].free == 68702699520 - 10854400
    assert found.gpus[0].processes == (GpuProcess(4711, 29900000000),)


@pytest.mark.parametrize("said", ["", "no devices", "{}", "<a>"])
def test_what_cannot_be_read_is_no_gpu(said: str) -> None:
    assert parse_nvidia(said).gpus == ()
    assert parse_rocm(said).gpus == ()


def put_tool(folder: Path, name: str, script: str) -> None:
    tool = folder / name
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)


def test_the_tool_on_the_path_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "said").write_text(ROCM)
    put_tool(tmp_path, "rocm-smi", f"cat {tmp_path}/said")
    asked = query_gpus()
    assert asked == parse_rocm(ROCM)
    (tmp_path / "said.xml").write_text(NVIDIA)
    put_tool(tmp_path, "nvidia-smi", f"cat {tmp_path}/said.xml")
    assert query_gpus() == parse_nvidia(NVIDIA)
    put_tool(tmp_path, "nvidia-smi", f"echo '{MISMATCH}'; exit 18")
    asked = query_gpus()
    assert asked is not None
    assert asked.error == "Failed to initialize NVML: Driver/library version mismatch"


# --- torch and driver


def levels(torch: TorchFacts, tools: GpuInventory | None, devices: str = "nvidia") -> list[tuple[str, str]]:
    return [(one.level, one.check) for one in check_torch(torch, tools, devices)]  # type: ignore[arg-type]


def said(torch: TorchFacts, tools: GpuInventory | None = TOOLS, devices: str = "nvidia") -> Finding:
    [finding] = check_torch(torch, tools, devices)  # type: ignore[arg-type]
    return finding


def test_a_torch_for_cpus_on_a_machine_with_gpus_is_an_error() -> None:
    cpu = TorchFacts(version="2.13.0+cpu")
    assert levels(cpu, TOOLS) == [("error", "torch")]
    assert levels(cpu, None, "amd") == [("error", "torch")]
    assert levels(cpu, None, "") == [("ok", "torch")]


def test_a_torch_for_newer_cuda_than_the_drivers_is_an_error_with_the_driver_to_take() -> None:
    newer = replace(TORCH, version="2.13.0+cu130", cuda="13.0", available=False, why_not="driver too old")
    found = said(newer)
    assert (found.level, found.check) == ("error", "driver")
    assert "CUDA 13.0" in found.what
    assert "12.4" in found.what
    assert "580" in found.fix


def test_within_a_major_version_torch_may_be_newer() -> None:
    assert said(replace(TORCH, cuda="12.8")).level == "note"
    assert said(replace(TORCH, cuda="12.8", available=False, why_not="no kernel image")).level == "error"
    assert said(replace(TORCH, cuda="12.1")).level == "ok"
    assert said(replace(TORCH, cuda="11.8")).level == "ok"


def test_why_torch_finds_no_gpu_is_said() -> None:
    found = said(replace(TORCH, available=False, num_devices=0, why_not="No CUDA GPUs are available"))
    assert found.level == "error"
    assert "No CUDA GPUs are available" in found.what
    assert "CUDA_VISIBLE_DEVICES" in found.fix


@pytest.mark.parametrize(("error", "fix"), [(NO_DRIVER, "modprobe"), (MISMATCH.splitlines()[0], "reboot")])
def test_a_driver_that_does_not_answer_comes_with_its_words_and_a_remedy(error: str, fix: str) -> None:
    found = said(TORCH, GpuInventory("nvidia", "", "", (), error))
    assert (found.level, found.check) == ("error", "driver")
    assert error in found.what
    assert fix in found.fix


def test_a_torch_that_cannot_be_imported_is_an_error() -> None:
    assert said(TorchFacts(error="ImportError: libcudart.so.12: cannot open"), None, "").level == "error"


def test_a_torch_for_gpus_without_one_is_a_note() -> None:
    assert levels(replace(TORCH, available=False), None, "") == [("note", "torch")]


# --- who is on them

RAYLET = NodeProcess(10, 1, "raylet", "raylet --gcs-address=10.0.0.1:6379", "me", True)
STRANGER = NodeProcess(4711, 1, "python", "python /home/ann/train.py", "ann")


def on_gpu(process: NodeProcess | None, pid: int = 4711, raylet: int | None = 10) -> Finding:
    table = {one.pid: one for one in (RAYLET, process) if one is not None}
    gpus = (replace(TOOLS.gpus[0], used=40 * GIB, processes=(GpuProcess(pid, 40 * GIB),)),)
    [finding] = check_gpus(replace(TOOLS, gpus=gpus), table, raylet)
    return finding


def test_a_strange_process_on_a_gpu_is_named_with_user_and_memory() -> None:
    found = on_gpu(STRANGER)
    assert found.level == "warning"
    assert found.device == "GPU 0"
    assert "python (pid 4711, ann) has 40 GiB: not Ray's and not Corral's" in found.what


def test_whose_a_process_on_a_gpu_is() -> None:
    ours = replace(STRANGER, name="ray::DeviceProcess", command="ray::DeviceProcess.call", parent=10)
    assert on_gpu(ours).level == "note"
    assert "a run on this cluster" in on_gpu(ours).what
    assert "another Ray cluster" in on_gpu(ours, raylet=None).what
    assert "a Ray cluster that is gone" in on_gpu(replace(ours, parent=1)).what
    assert "a run of Corral" in on_gpu(replace(STRANGER, command="corral train x.yaml")).what
    assert "cannot be seen from here" in on_gpu(None).what


def test_memory_that_nobody_seems_to_have_is_a_warning() -> None:
    [found] = check_gpus(replace(TOOLS, gpus=(replace(TOOLS.gpus[0], used=60 * GIB),)), {}, None)
    assert found.level == "warning"
    assert "60 GiB of 80 GiB" in found.what


def test_the_recorded_gpus_of_both_vendors() -> None:
    nvidia = [(one.level, one.check, one.device) for one in check_gpus(parse_nvidia(NVIDIA), {4711: STRANGER}, None)]
    assert nvidia == [
        ("warning", "GPU memory", "GPU 0"),
        ("error", "GPU health", "GPU 1"),
        ("warning", "GPU mode", "GPU 1"),
        ("warning", "GPU mode", "GPU 1"),
    ]
    amd = [(one.level, one.check, one.device) for one in check_gpus(parse_rocm(ROCM), {4711: STRANGER}, None)]
    assert amd == [("warning", "GPU memory", None)]
    assert [one.level for one in check_gpus(TOOLS, {}, None)] == ["ok"]


def test_ray_and_torch_must_agree_on_the_number_of_gpus() -> None:
    [more] = check_num_gpus(num_torch=4, num_ray=8)
    assert more.level == "error"
    assert "--devices 4" in more.fix
    assert [one.level for one in check_num_gpus(8, 4)] == ["note"]
    assert list(check_num_gpus(8, 8)) == []


@pytest.mark.parametrize(
    ("capability", "built_for", "has"),
    [
        ((7, 0), ["sm_75", "sm_80", "sm_90", "sm_100", "compute_120"], False),
        ((7, 0), ["sm_50", "sm_70", "sm_90"], True),
        ((8, 9), ["sm_80", "sm_90"], True),
        ((9, 0), ["sm_80", "sm_90a"], True),
        ((10, 3), ["sm_80", "compute_90"], True),
        ((10, 3), ["sm_80", "sm_90"], False),
    ],
)
def test_a_build_of_torch_without_code_for_a_gpu_is_known(
    capability: tuple[int, int], built_for: list[str], has: bool
) -> None:
    """By NVIDIA's rules: machine code runs on GPUs of its own generation, PTX also on newer ones."""
    assert has_code(capability, built_for) == has


def test_a_gpu_that_torch_has_no_code_for_is_an_error() -> None:
    torch = TorchFacts("2.13.0+cu130", cuda="13.0", available=True, num_devices=8, without_code=("V100 (sm_70)",))
    [found] = check_torch(torch, None, "nvidia")
    assert (found.level, found.what) == ("error", "torch 2.13.0+cu130 was built without code for V100 (sm_70)")
    assert "cu126" in found.fix
