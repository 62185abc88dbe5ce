"""How several processes start: flags, schedulers and their GPUs, and the line where they cannot."""

import os

import jax
import pytest

from fedjax_cluster import cli
from fedjax_cluster.parallel import processes
from tests.parallel.started import ROOT, ended, free_port, start


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--process-id 1", "process_id is 1, but no coordinator"),
        ("--num-processes 2", "num_processes is 2, but no coordinator"),
        ("--coordinator localhost:1 --num-processes 2 --process-id 2", "process_id is 2, but there are 2 processes"),
        ("--coordinator localhost:1 --num-processes 2 --process-id -1", "process_id is -1, but there are 2"),
        ("--coordinator localhost:1 --num-processes 0 --process-id 0", "num_processes is 0; give at least 1"),
        ("--coordinator localhost --num-processes 2 --process-id 0", "coordinator is 'localhost'; give HOST:PORT"),
        ("--coordinator a:99999 --num-processes 2 --process-id 0", "coordinator is 'a:99999'; give HOST:PORT"),
        ("--coordinator localhost:1 --num-processes 2", "but process_id is not given"),
        ("--coordinator auto --process-id 0", "but coordinator is auto"),
        ("--coordinator localhost:1 --num-processes two --process-id 0", "--num-processes"),
    ],
)
def test_flags_that_make_no_processes_are_one_line(words, message, capsys, monkeypatch):
    monkeypatch.setattr(cli, "_prepare_jax", lambda: None)
    for command in (["run"], ["resume", "nowhere"]):
        assert cli.main([*command, *words.split()]) == 2
        said = capsys.readouterr().err
        assert message in said
        assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("compare fedavg ifca", "compare takes one process: several carry out `run` and `resume` alone"),
        ("sweep ifca --clusters 2 4", "sweep takes one process"),
        ("run fedavg --tune", "--tune takes one process"),
        ("plan fedavg", "a plan takes one process"),
    ],
)
def test_commands_of_one_process_refuse_others_before_they_wait(command, message, capsys, monkeypatch):
    monkeypatch.setattr(cli, "_prepare_jax", lambda: None)
    words = f"{command} --coordinator localhost:1 --num-processes 2 --process-id 0"
    assert cli.main(words.split()) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


TASK = "SLURM_PROCID=1 SLURM_NTASKS=8 SLURM_STEP_NUM_NODES=4 SLURM_LOCALID=1"


@pytest.mark.parametrize(
    ("environment", "own"),
    [
        ("SLURM_PROCID=1 SLURM_NTASKS=4 SLURM_STEP_NUM_NODES=4 SLURM_LOCALID=0", True),
        ("SLURM_PROCID=1 SLURM_NTASKS=8 SLURM_STEP_NUM_NODES=4 SLURM_LOCALID=1", False),
        (TASK + " SLURM_GPUS_PER_TASK=2 CUDA_VISIBLE_DEVICES=0,1", True),
        (TASK + " SLURM_GPUS_PER_TASK=a100:1 CUDA_VISIBLE_DEVICES=0", True),
        (TASK + " SLURM_GPUS_PER_TASK=1 CUDA_VISIBLE_DEVICES=0,1", False),  # --gpu-bind=none
        (TASK + " SLURM_GPUS_PER_TASK=1", False),
        (TASK + " CUDA_VISIBLE_DEVICES=0", True),  # --gpu-bind=single:1
        ("SLURM_PROCID=1 SLURM_NTASKS=4 SLURM_STEP_NUM_NODES=4 JAX_LOCAL_DEVICE_IDS=0", False),
        ("OMPI_MCA_orte_hnp_uri=1 OMPI_COMM_WORLD_LOCAL_SIZE=1 " + TASK, True),
        ("OMPI_MCA_orte_hnp_uri=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 SLURM_NTASKS=1 SLURM_STEP_NUM_NODES=1", False),
        ("KUBERNETES_SERVICE_HOST=10.0.0.1", False),
    ],
)
def test_whose_gpus_a_node_has(environment, own):
    """Faults: one task a node takes one of its four GPUs; two of a node take the same; a task lacks its second."""
    assert processes._has_its_gpus(dict(word.split("=") for word in environment.split())) is own


JOINS = """
import jax
from fedjax_cluster import parallel
parallel.start_processes()
print(jax.process_index(), jax.process_count(), jax.config.values["jax_cuda_visible_devices"])
"""


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "seen"), [("2", ["all", "all"]), ("1", ["0", "1"])])
def test_slurm_tells_of_the_processes(nodes, seen):
    """Faults: auto does not start where SLURM does; the GPUs of a node go to one device."""
    slurm = {"SLURM_JOB_ID": str(free_port()), "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
    started = []
    for number in "01":
        place = {"SLURM_PROCID": number, "SLURM_LOCALID": number if nodes == "1" else "0"}
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **slurm, **place}
        started += start(["-c", JOINS], env={**environment, "SLURM_STEP_NUM_NODES": nodes})
    said = ended(started, 120)
    assert [out.split() for out, _ in said] == [[str(number), "2", seen[number]] for number in (0, 1)], said


@pytest.mark.parametrize("kubernetes", [False, True])
def test_a_scheduler_that_cannot_be_asked_is_one_line(kubernetes, monkeypatch):
    """Fault: the traceback of what asks Kubernetes, or a page of what to install."""

    def forbidden(*_, **__):
        raise RuntimeError("Kubernetes API Error: 403 - Forbidden\nIt appears that the service account")

    monkeypatch.setattr(jax.distributed, "initialize", forbidden)
    monkeypatch.setattr(processes, "_at_an_abort", lambda _: lambda: None)
    if kubernetes:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    with pytest.raises(ValueError, match="403") as error:
        processes.start_processes()
    assert "\n" not in str(error.value)
    assert ("[k8s]" in str(error.value)) is kubernetes
