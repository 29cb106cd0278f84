"""A short crash campaign with a fixed seed, and that the campaign itself would see what it looks for."""

import random
import shutil
import sys

import crash_rig
import pytest

from chaos.campaign import Campaign, tiny_engine
from chaos.disk import Armed, shim
from chaos.grounds import ground
from chaos.invariants import Findings, check_finished, check_kept
from chaos.outputs import committed
from chaos.power_loss import lose_power, sure_files

SEED, ROUNDS = 1, 39


@pytest.fixture(scope="module")
def campaign(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chaos")
    return Campaign(folder, tiny_engine(folder), SEED)


@pytest.mark.slow
def test_no_fault_loses_doubles_or_rewrites_anything(campaign, capsys):
    for _ in campaign.rounds(0, ROUNDS, minutes=2):
        pass
    with capsys.disabled():
        sys.stdout.write(f"\nseed {SEED}\n{campaign.report()}\n")
    assert campaign.wrong == []
    assert {kind for kind, row in campaign.table.items() if row.rounds} == set(campaign.kinds)
    # A fault may come too late for its round (a kill at a random moment), but not as a rule.
    assert sum(row.findings.injected for row in campaign.table.values()) >= sum(
        row.rounds for row in campaign.table.values()
    )


class TestInvariants:
    @pytest.fixture
    def out(self, campaign, tmp_path):
        return shutil.copytree(campaign.unbroken, tmp_path / "out")

    def findings(self, out, campaign):
        findings = Findings()
        check_finished(findings, out, campaign.unbroken)
        return findings

    def test_a_copy_of_the_unbroken_run_passes(self, out, campaign):
        assert self.findings(out, campaign) == Findings()

    def test_a_shard_of_other_bytes_is_seen(self, out, campaign):
        path = sorted((out / "data").iterdir())[3]
        path.write_bytes(path.read_bytes().replace(b"row 1", b"row 2"))
        assert self.findings(out, campaign).wrong

    def test_a_file_that_is_left_behind_is_seen(self, out, campaign):
        (out / "tmp").mkdir()
        (out / "tmp" / "shard-00001.7-abcd").touch()
        assert self.findings(out, campaign).wrong == ["left behind: ['tmp', 'tmp/shard-00001.7-abcd']"]

    def test_a_committed_file_that_is_written_again_is_seen(self, out):
        findings, before = Findings(), crash_rig.committed(out)
        path = sorted((out / "data").iterdir())[3]
        path.write_bytes(path.read_bytes())
        check_kept(findings, out, before, "now")
        assert (findings.rewritten, len(findings.wrong)) == (1, 1)


class TestPowerLoss:
    """Some changes, as the shim records them: what was synced stays whatever is drawn, the rest may go."""

    def log(self, folder, *lines):
        (folder / "log").write_text("".join("\t".join(map(str, line)) + "\n" for line in lines))
        (folder / "spare").mkdir()
        return folder / "log"

    def made(self, path, content):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        return path.stat().st_ino

    @pytest.mark.parametrize("seed", range(8))
    def test_a_synced_file_under_a_synced_name_stays(self, seed, tmp_path):
        path = tmp_path / "out" / "file"
        inode = self.made(path, b"content")
        lines = [("C", inode, 0, path, ""), ("S", inode, 7, path, ""), ("D", 1, 0, path.parent, "")]
        log = self.log(tmp_path, *lines)
        assert sure_files(log) == [path]
        assert lose_power(log, tmp_path / "spare", random.Random(seed)) == 0
        assert path.read_bytes() == b"content"

    def test_a_name_that_was_not_synced_may_go(self, tmp_path):
        found = set()
        for seed in range(8):
            folder = tmp_path / str(seed)
            path = folder / "out" / "file"
            folder.mkdir()
            inode = self.made(path, b"content")
            log = self.log(folder, ("C", inode, 0, path, ""), ("S", inode, 7, path, ""))
            lose_power(log, folder / "spare", random.Random(seed))
            found.add(path.exists())
        assert found == {True, False}

    def test_bytes_that_were_not_synced_may_be_cut_or_zeros(self, tmp_path):
        found = set()
        for seed in range(30):
            folder = tmp_path / str(seed)
            path = folder / "out" / "file"
            folder.mkdir()
            inode = self.made(path, b"synced, not synced")
            log = self.log(folder, ("C", inode, 0, path, ""), ("S", inode, 6, path, ""), ("D", 1, 0, path.parent, ""))
            lose_power(log, folder / "spare", random.Random(seed))
            content = path.read_bytes()
            assert content.startswith(b"synced")
            found.add("whole" if b"not" in content else "zeros" if content.endswith(b"\0") else "cut")
        assert found == {"whole", "zeros", "cut"}

    def test_a_rename_may_be_half_done(self, tmp_path):
        found = set()
        for seed in range(30):
            folder = tmp_path / str(seed)
            old, new = folder / "tmp" / "file", folder / "data" / "file"
            folder.mkdir()
            old.parent.mkdir()
            inode = self.made(new, b"content")
            lines = [("C", inode, 0, old, ""), ("S", inode, 7, old, ""), ("D", 1, 0, old.parent, "")]
            log = self.log(folder, *lines, ("R", inode, 0, old, new))
            lose_power(log, folder / "spare", random.Random(seed))
            found.add((old.exists(), new.exists()))
        assert found == {(True, True), (True, False), (False, True), (False, False)}


@pytest.mark.skipif(not shim()[0], reason=shim()[1] or "there is a shim")
@pytest.mark.parametrize(("how", "code"), [("fail", 2), ("short", 0), ("kill before", -9), ("kill after", -9)])
def test_the_shim_strikes_at_the_operation_that_was_asked_for(how, code, campaign, tmp_path):
    import warm_command

    out, log = tmp_path / "out", tmp_path.with_suffix(".log")
    armed = Armed(operations=("link",), action=how, nth=4, stays=True)
    arguments = crash_rig.arguments(campaign.engine, campaign.rows, out)
    prepare = [armed.preparation(tmp_path, log)]
    assert warm_command.call(*arguments, preload=campaign.ground.preload, prepare=prepare).code == code
    assert crash_rig.num_commits(out) == {"fail": 2, "short": 12, "kill before": 2, "kill after": 3}[how]


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores")
    with ground(folder, "s3", "local", "moto") as place:
        yield Campaign(folder, tiny_engine(folder), SEED, place)


@pytest.mark.slow
def test_no_fault_of_a_store_loses_doubles_or_rewrites_anything(stores, capsys):
    """A round of each kind: machines that race, zombies, answers lost, cut and refused."""
    for _ in stores.rounds(0, len(stores.kinds), minutes=4):
        pass
    with capsys.disabled():
        sys.stdout.write(f"\nseed {SEED}\n{stores.report()}\n")
    assert stores.wrong == []
    assert sum(row.rounds for row in stores.table.values()) == len(stores.kinds)


def test_an_object_that_is_written_again_or_left_behind_is_seen(stores):
    out, findings = stores.ground.where(stores.folder / "trial"), Findings()
    check_finished(findings, out, stores.unbroken)
    assert findings == Findings()
    before = committed(out)
    path = sorted((out / "data").iterdir(), key=str)[3]
    path.replace(path.read_bytes().replace(b"row 1", b"row 2"))
    (out / "data" / "shard-00001-abcd").replace(b"")
    check_kept(findings, out, before, "now")
    check_finished(findings, out, stores.unbroken)
    assert findings.rewritten == 1
    assert findings.wrong[-1] == "left behind: ['data/shard-00001-abcd']"


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore")  # Ray's own
@pytest.mark.parametrize("output", ["directory", "s3"])
def test_no_fault_of_a_cluster_loses_doubles_or_rewrites_anything(output, tmp_path, capsys):
    pytest.importorskip("ray", reason='ray is not installed: pip install "extract-hidden-states[ray]"')
    with ground(tmp_path, output, "ray", "moto") as place:
        clusters = Campaign(tmp_path, tiny_engine(tmp_path), SEED, place)
        for _ in clusters.rounds(0, len(clusters.kinds), minutes=8):
            pass
        with capsys.disabled():
            sys.stdout.write(f"\nseed {SEED}\n{clusters.report()}\n")
        assert clusters.wrong == []
