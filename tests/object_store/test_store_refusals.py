"""What a store, or the way to it, says no to is one line with what to do, and holds no secret."""

import http.server
import threading

import careless_rig
import crash_rig
import moto_rig
import obstore
import pytest
from command_line import extract

from extract.output import open_output
from extract.storage import BadAddress, locate
from extract.storage.refusals import StoreRefused, refusal


@pytest.fixture
def scheme() -> str:
    """The words are those of S3 servers."""
    return "s3"


def refused(address: str) -> str:
    with pytest.raises(StoreRefused) as caught:
        open_output(address)
    assert caught.value.exit_code == 2
    assert "not-a-secret" not in str(caught.value)
    return str(caught.value)


def test_no_such_bucket(settings):
    assert refused("s3://no-such-bucket/out") == (
        "s3://no-such-bucket: no such bucket (NoSuchBucket). Create it, or check the name and AWS_ENDPOINT_URL."
    )


def test_nobody_listens(address, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{moto_rig.free_port()}")
    assert refused(address) == (
        f"{address}/job.json: the store does not answer. Check the network and AWS_ENDPOINT_URL."
    )


def test_no_such_host(address, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://no-such-host.invalid:9000")
    assert refused(address) == (
        f"{address}/job.json: the store does not answer. Check the network and AWS_ENDPOINT_URL."
    )


def test_what_answers_is_no_object_store(address, monkeypatch):
    class WebSite(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_error(404)

        do_GET = do_HEAD

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), WebSite)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    try:
        assert refused(address) == (
            "s3://states: what answers there does not behave as an object store (404 Not Found). "
            "Check AWS_ENDPOINT_URL."
        )
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


SAID = "Generic S3 error: Error performing PUT in 1ms - Server returned non-2xx status code: "
SETTINGS = "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and AWS_ENDPOINT_URL"


@pytest.mark.parametrize(
    ("status", "code", "says"),
    [
        ("403 Forbidden", "AccessDenied", f"no permission (AccessDenied). Allow it, or check {SETTINGS}."),
        ("403 Forbidden", "InvalidAccessKeyId", f"the credentials are refused (InvalidAccessKeyId). Check {SETTINGS}."),
        (
            "403 Forbidden",
            "SignatureDoesNotMatch",
            f"the credentials are refused (SignatureDoesNotMatch). Check {SETTINGS}.",
        ),
        (
            "403 Forbidden",
            "RequestTimeTooSkewed",
            "this machine's clock differs too much from the store's (RequestTimeTooSkewed). Set the clock (NTP).",
        ),
        (
            "301 Moved Permanently",
            "PermanentRedirect",
            "the bucket lies in another region or behind another endpoint (PermanentRedirect). "
            "Set AWS_REGION and AWS_ENDPOINT_URL to the bucket's.",
        ),
        (
            "405 Method Not Allowed",
            "",
            "what answers there does not behave as an object store (405 Method Not Allowed). Check AWS_ENDPOINT_URL.",
        ),
    ],
)
def test_each_answer_has_its_words(status, code, says):
    body = f": <Error><Code>{code}</Code><AWSAccessKeyId>test</AWSAccessKeyId></Error>" if code else ": \n"
    found = refusal("s3://states/out", obstore.exceptions.GenericError(SAID + status + body))
    assert (found.exit_code, str(found)) == (2, f"s3://states/out: {says}")


def test_a_full_store_is_out_of_space():
    found = refusal("s3://states/out", obstore.exceptions.GenericError(f"{SAID}403: <Code>QuotaExceeded</Code>"))
    assert found.exit_code == 8


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("ftp://host/out", 'ftp://host/out: addresses of the scheme "ftp" are not known here.'),
        ("s3://", "s3://: it names no bucket, or a relative path in one."),
        ("s3://states/a/../b", "s3://states/a/../b: it names no bucket, or a relative path in one."),
        (
            "s3://key:hush@states/out",
            "s3://...states/out: user names and passwords do not belong into an address.",
        ),
    ],
)
def test_an_address_that_cannot_be_used_is_refused(address, problem):
    with pytest.raises(BadAddress) as caught:
        locate(address)
    hint = "Give a path, file:///PATH, s3://BUCKET/PREFIX or gs://BUCKET/PREFIX."
    assert str(caught.value) == f"{problem} {hint}"


def test_file_addresses_are_paths(tmp_path):
    assert locate(f"file://{tmp_path}/a%20b") == tmp_path / "a b"


def test_each_command_ends_with_the_code_of_what_was_at_fault(tiny_engine, settings, capsys, tmp_path):
    rows = tmp_path / "rows.parquet"
    crash_rig.write_rows(rows)
    gone = "s3://no-such-bucket/x"
    said = "s3://no-such-bucket: no such bucket (NoSuchBucket). Create it, or check the name and AWS_ENDPOINT_URL.\n"
    for code, arguments in {
        3: ["plan", "--engine", tiny_engine, "--data", f"{gone}.parquet"],
        4: ["plan", "--engine", gone, "--data", rows],
        2: ["run", "--engine", tiny_engine, "--data", rows, "-o", gone, "--quiet"],
    }.items():
        ended = extract(capsys, *arguments)
        assert (ended.code, ended.out, ended.err) == (code, "", f"extract: {said}")


def test_no_secret_is_written_or_said(tiny_engine, address, place, capsys, tmp_path):
    rows = crash_rig.write_rows(tmp_path / "rows.parquet")
    arguments = ["run", "--engine", tiny_engine, "--data", rows, "-o", address, "--reserve-bytes", 0, "--json"]
    ended = extract(capsys, *arguments, "--threads", 1)
    assert ended.code == 0
    stored = b"".join(path.read_bytes() for path, _ in place.walk())
    assert b"not-a-secret" not in stored + ended.out.encode() + ended.err.encode()


def test_a_job_to_a_store_without_conditional_writes_is_refused_before_it_computes(
    tiny_engine, endpoint, address, place, capsys, tmp_path, monkeypatch
):
    rows = crash_rig.write_rows(tmp_path / "rows.parquet")
    with careless_rig.careless(endpoint) as careless:
        monkeypatch.setenv("AWS_ENDPOINT_URL", careless)
        ended = extract(capsys, "run", "--engine", tiny_engine, "--data", rows, "-o", address, "--quiet")
        assert (ended.code, ended.out) == (2, "")
        assert ended.err == (
            f"extract: {address}: this store overwrites what it was asked to create only if absent, so two workers "
            "could both commit one shard. Choose a store that refuses (AWS S3, Google Cloud Storage, Ceph, MinIO), or "
            "a directory with -o.\n"
        )
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    assert list(locate(address).walk()) == []


def test_free_space_is_that_of_the_local_folder(tiny_engine, address, tmp_path, capsys):
    rows = crash_rig.write_rows(tmp_path / "rows.parquet")
    arguments = ["--engine", tiny_engine, "--data", rows, "-o", address, "--reserve-bytes", 10**18]
    ended = extract(capsys, "run", *arguments, "--quiet")
    assert ended.code == 8
    assert ended.err.startswith(f"extract: {tmp_path / 'scratch'}")
