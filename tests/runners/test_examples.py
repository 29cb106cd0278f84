"""The examples of docs/distributed.md: each parses as what it is, and its command lines are run, to the same bytes."""

import json
import re
import shlex
from pathlib import Path

import pytest
import warm_command
import yaml
from command_line import spawn
from crash_rig import NUM_ROWS, ROWS_PER_SHARD, content, stored_keys, write_rows

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "distributed.md"
EXAMPLES = dict(re.findall(r"<!-- example: (\S+) -->\n```\w+\n(.*?)```", DOCUMENT.read_text(), re.DOTALL))
TINY = ["--rows-per-shard", ROWS_PER_SHARD, "--id-column", "key", "--threads", 1, "--reserve-bytes", 0, "--quiet"]


def commands(script: str) -> list[str]:
    """The lines of a shell script that run `extract`, continuation lines joined."""
    lines = script.replace("\\\n", " ").splitlines()
    return [line.strip().removeprefix("exec ") for line in lines if re.match(r"\s*(exec )?extract ", line)]


def filled(words: list[str], variables: dict[str, object]) -> list[str]:
    """With the variables put in as a shell or Kubernetes does; one that is not set is an error."""
    return [
        re.sub(r"\$\{?(\w+)\}?|\$\((\w+)\)", lambda found: str(variables[found[1] or found[2]]), one) for one in words
    ]


@pytest.fixture
def shared(tiny_engine, tmp_path):
    """What /shared holds."""
    write_rows(tmp_path / "texts.parquet")
    (tmp_path / "engine").symlink_to(tiny_engine)
    return tmp_path


def run(words: list[str], shared: Path, *options: object) -> warm_command.Ended:
    assert words[0] == "extract"
    here = [word.replace("/shared/", f"{shared}/") for word in words[1:]]
    return warm_command.call(*here, *(options if here[0] == "run" else ()))


def check(shared: Path, unbroken: Path) -> None:
    assert content(shared / "out") == content(unbroken)
    assert stored_keys(shared / "out") == [f"row {n}" for n in range(NUM_ROWS)]


def test_the_examples_are_these():
    assert set(EXAMPLES) >= {"slurm.sh", "slurm-finalize.sh", "kubernetes.yaml", "skypilot.yaml", "rayjob.yaml"}


def test_the_slurm_array_makes_the_job(shared, unbroken):
    script, end = EXAMPLES["slurm.sh"], EXAMPLES["slurm-finalize.sh"]
    first, last = map(int, re.search(r"--array=(\d+)-(\d+)", script).groups())
    (line,) = commands(script)
    words = shlex.split(line)
    assert words[words.index("--worker-count") + 1] == str(last + 1)
    assert first == 0
    small = [*words[: words.index("--worker-count")], "--worker-count", "2"]  # two of them are proof enough
    for task in range(2):
        ended = run(filled(small, {"SLURM_ARRAY_TASK_ID": task}), shared, *TINY)
        assert ended.code == 0, ended.err
    assert run(shlex.split(commands(end)[0]), shared).code == 0
    check(shared, unbroken)


def test_the_indexed_job_makes_the_job(shared, unbroken):
    job, end = yaml.safe_load_all(EXAMPLES["kubernetes.yaml"])
    assert (job["kind"], job["spec"]["completionMode"]) == ("Job", "Indexed")
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 16
    (container,) = job["spec"]["template"]["spec"]["containers"]
    words = container["command"]
    count = words.index("--worker-count") + 1
    assert words[count] == str(job["spec"]["completions"])
    for index in range(2):
        ended = run(
            filled([*words[:count], "2", *words[count + 1 :]], {"JOB_COMPLETION_INDEX": index}), shared, *TINY[:-1]
        )
        assert ended.code == 0, ended.err
    (container,) = end["spec"]["template"]["spec"]["containers"]
    assert run(container["command"], shared).code == 0
    check(shared, unbroken)


def test_the_skypilot_task_makes_the_job(shared, unbroken):
    task = yaml.safe_load(EXAMPLES["skypilot.yaml"])
    assert task["num_nodes"] == 4
    (line,) = commands(task["run"])
    for rank in range(2):
        settings = {"SKYPILOT_NODE_RANK": rank, "SKYPILOT_NUM_NODES": 2, "SKYPILOT_NUM_GPUS_PER_NODE": 1}
        ended = run(filled(shlex.split(line), settings), shared, *TINY, "--json")
        assert json.loads(ended.out)["num_shards_left"] == 0
    assert warm_command.call("finalize", shared / "out").code == 0
    check(shared, unbroken)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_ray_job_makes_the_job(shared, unbroken):
    pytest.importorskip("ray", reason='ray is not installed: pip install "extract-hidden-states[ray]"')
    job = yaml.safe_load(EXAMPLES["rayjob.yaml"])
    assert job["kind"] == "RayJob"
    words = shlex.split(job["spec"]["entrypoint"])
    place = words.index("--address")
    assert words[place + 1] == "auto"
    here = [*words[:place], *words[place + 2 :]]  # an instance of this machine instead
    ended = spawn(*(word.replace("/shared/", f"{shared}/") for word in here[1:]), *TINY[:-1])
    assert ended.code == 0, ended.err
    check(shared, unbroken)
