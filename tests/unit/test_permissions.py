"""What each role may do, as pure functions of the names; a real broker is asked in tests/integration/test_secure*."""

import json
from pathlib import Path

import pytest

from headrace.bus import permissions
from headrace.bus.consumers import are_overlapping
from headrace.bus.credentials import connect_options, new_credential, public_key, read_credential
from headrace.bus.members import STANDING, Member, Tls, accounts, as_text
from headrace.bus.securing import SecureDirectory
from headrace.errors import ConfigError
from headrace.schemas.subjects import Names, QueueName, is_reply_to_tenant, service_inbox
from headrace.settings import Settings

NAMES = Names()
OTHER = Names("other.v2")


def touches(pattern: str, subjects: tuple[str, ...]) -> list[str]:
    """Which of the subjects have any in common with the pattern."""
    return [subject for subject in subjects if are_overlapping(pattern, subject)]


def test_a_tenant_has_exactly_its_own_subjects() -> None:
    own = permissions.tenant(NAMES, "acme")
    assert own.publish == ("headrace.v1.infer.acme.>", "headrace.v1.cancel.acme.>", "headrace.v1.status.acme.>")
    assert own.subscribe == ("_INBOX.acme.>",)
    assert not own.may_answer
    other = permissions.tenant(NAMES, "acme-2")
    for subject in own.publish:
        assert not touches(subject, other.publish)
    assert not touches(own.subscribe[0], other.subscribe)


def test_a_worker_has_one_model_its_pools_and_one_key() -> None:
    own = permissions.worker(NAMES, "w1", "org/m-1", ("gold", "silver"))
    for queue in (QueueName("gold", "high", "q"), QueueName("silver", "low", "acme")):
        make = f"$JS.API.CONSUMER.CREATE.HEADRACE_V1_JOBS_org=2Fm-1.{queue.consumer}.{NAMES.jobs('org/m-1', queue)}"
        assert touches(make, own.publish)
    for queue in (QueueName(), QueueName("golden")):
        make = f"$JS.API.CONSUMER.CREATE.HEADRACE_V1_JOBS_org=2Fm-1.{queue.consumer}.{NAMES.jobs('org/m-1', queue)}"
        assert not touches(make, own.publish)
        assert not touches(NAMES.wake("org/m-1", queue), own.subscribe)
    assert touches("$KV.HEADRACE_V1_workers.w1", own.publish)
    assert not touches("$KV.HEADRACE_V1_workers.w2", own.publish)
    for call in ("STREAM.CREATE", "STREAM.UPDATE", "STREAM.DELETE", "STREAM.PURGE", "STREAM.MSG.DELETE"):
        assert not touches(f"$JS.API.{call}.*", own.publish)
    assert not touches("$JS.API.CONSUMER.DELETE.*.*", own.publish)
    assert touches(f"{service_inbox('worker', 'w1')}.x.y", own.subscribe)
    assert not touches(f"{service_inbox('worker', 'w2')}.>", own.subscribe)


@pytest.mark.parametrize("role", ["router", "worker", "monitor", "gateway", "host"])
def test_a_service_may_delete_no_stream_and_touch_no_other_deployment(role: str) -> None:
    made = {
        "router": permissions.router(NAMES),
        "worker": permissions.worker(NAMES, "w", "m"),
        "monitor": permissions.monitor(NAMES),
        "gateway": permissions.gateway(NAMES),
        "host": permissions.host(NAMES),
    }[role]
    assert not touches("$JS.API.STREAM.DELETE.*", made.publish)
    assert not touches("$JS.API.ACCOUNT.>", made.publish)
    assert not touches("$SYS.>", (*made.publish, *made.subscribe))
    assert not touches(f"{OTHER.prefix}.>", (*made.publish, *made.subscribe))
    assert not touches(f"$KV.{OTHER.config_bucket}.>", (*made.publish, *made.subscribe))
    assert not touches(f"$JS.API.STREAM.PURGE.{OTHER.log_stream(0)}", made.publish)


def test_only_the_system_user_is_outside_the_account() -> None:
    members = [Member(role=each.role, tenant=each.tenant, key=f"U{number}") for number, each in enumerate(STANDING)]
    config = accounts(NAMES, members, None)
    assert len(config["accounts"]["HEADRACE"]["users"]) == len(STANDING) - 1
    (system,) = config["accounts"]["SYS"]["users"]
    assert system["permissions"]["publish"] == {"deny": [">"]}
    assert system["permissions"]["subscribe"] == {"allow": ["$SYS.ACCOUNT.*.DISCONNECT"]}
    tls = accounts(NAMES, members, Tls(cert="c", key="k", ca="a", must_verify=True))["tls"]
    assert tls == {"cert_file": "c", "key_file": "k", "ca_file": "a", "verify": True}


def test_no_value_breaks_out_of_the_configuration() -> None:
    text = as_text({"a": 'x"\n}', "b": {"c": 1}})
    assert text.count("\n") == text.strip().count("\n") + 1
    assert json.loads(text.splitlines()[0].removeprefix("a: ")) == 'x"\n}'


def test_answers_to_a_tenant_go_to_it_or_to_who_asks_for_it() -> None:
    assert is_reply_to_tenant("_INBOX.acme.x", "acme")
    assert is_reply_to_tenant("_INBOX._svc.gateway.x.y", "acme")
    assert is_reply_to_tenant("_INBOX._svc.operator.x", "acme")
    for reply in ("_INBOX.acme", "_INBOX.acme2.x", "_INBOX._svc.router.x", "_INBOX._svc.worker.w.x", "x._INBOX.acme.y"):
        assert not is_reply_to_tenant(reply, "acme")


# credentials


def test_a_credential_is_read_as_other_tools_write_it(tmp_path: Path) -> None:
    seed, key = new_credential(bytes(range(32)))
    assert key == public_key(seed)
    assert key.startswith("U")
    for number, text in enumerate((seed, f"{seed}\n", f"# mine\n\n  {seed}  \n")):
        file = tmp_path / str(number)
        file.write_text(text)
        assert read_credential(str(file), setting="X") == seed
        assert connect_options(Settings(nats_credentials=str(file))) == {"nkeys_seed_str": seed}


@pytest.mark.parametrize("content", [b"", b"SUAM", b"\xff\xfe", b"hello world", b"SA" + b"A" * 56, b"# nothing\n"])
def test_a_bad_credentials_file_is_named_and_not_quoted(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "bad.nk"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        connect_options(Settings(nats_credentials=str(file)))
    assert "HEADRACE_NATS_CREDENTIALS" in str(caught.value)
    assert str(file) in str(caught.value)
    assert content == b"" or content.decode("latin-1").strip() not in str(caught.value)


def test_missing_files_are_named(tmp_path: Path) -> None:
    missing = str(tmp_path / "none")
    with pytest.raises(ConfigError, match=f"HEADRACE_NATS_CREDENTIALS: cannot read {missing}"):
        connect_options(Settings(nats_credentials=missing))
    with pytest.raises(ConfigError, match=f"HEADRACE_NATS_TLS_CA: cannot use {missing}"):
        connect_options(Settings(nats_tls_ca=missing))
    with pytest.raises(ConfigError, match="HEADRACE_NATS_TLS_CERT and HEADRACE_NATS_TLS_KEY"):
        connect_options(Settings(nats_tls_cert=missing, nats_tls_key=missing))
    with pytest.raises(ConfigError, match="both or neither"):
        Settings(nats_tls_cert=missing)


def test_a_url_that_cannot_be_shows_no_password() -> None:
    with pytest.raises(ConfigError) as caught:
        Settings(nats_url="http://me:hunter2@host:4222")
    assert "hunter2" not in str(caught.value)
    assert "host:4222" in str(caught.value)


# the directory


def seeds(directory: SecureDirectory) -> dict[str, str]:
    """Every secret, by file name."""
    return {file.name: file.read_text() for file in (directory.path / "credentials").iterdir()}


def test_run_again_it_adds_and_changes_no_secret(tmp_path: Path) -> None:
    directory = SecureDirectory(tmp_path / "secure")
    first = directory.enrol(NAMES, [Member(role="tenant", tenant="acme")])
    assert {each.action for each in first} == {"created"}
    before = seeds(directory)
    again = directory.enrol(NAMES, [Member(role="worker", worker="w1", model="m")])
    assert {each.name: each.action for each in again if each.action != "kept"} == {"worker-w1": "created"}
    assert before.items() < seeds(directory).items()
    moved = directory.enrol(NAMES, [Member(role="worker", worker="w1", model="other")])
    assert [each.name for each in moved if each.action == "changed"] == ["worker-w1"]
    assert "HEADRACE_V1_JOBS_other" in directory.accounts.read_text()
    assert "_INBOX.acme.>" in directory.accounts.read_text()


def test_every_file_is_its_owners_alone_and_only_credentials_hold_secrets(tmp_path: Path) -> None:
    directory = SecureDirectory(tmp_path / "secure")
    directory.enrol(NAMES, [])
    for file in directory.path.rglob("*"):
        if file.is_file() and file.name != ".lock":
            assert file.stat().st_mode & 0o777 == 0o600, file
    for secret in seeds(directory).values():
        for file in (directory.accounts, directory.config, directory.path / "members.json"):
            assert secret not in file.read_text()


def test_a_credential_that_was_moved_away_stays_valid(tmp_path: Path) -> None:
    directory = SecureDirectory(tmp_path / "secure")
    acme = Member(role="tenant", tenant="acme")
    directory.enrol(NAMES, [acme])
    accounts_before = directory.accounts.read_text()
    directory.file_of(acme).unlink()
    directory.enrol(NAMES, [acme])
    assert directory.accounts.read_text() == accounts_before
    assert not directory.file_of(acme).exists()


def test_who_is_removed_is_no_user_any_more(tmp_path: Path) -> None:
    directory = SecureDirectory(tmp_path / "secure")
    acme = Member(role="tenant", tenant="acme")
    directory.enrol(NAMES, [acme])
    old = seeds(directory)["tenant-acme.nk"]
    done = directory.enrol(NAMES, [], removed=["tenant-acme"])
    assert [each.name for each in done if each.action == "removed"] == ["tenant-acme"]
    assert public_key(old) not in directory.accounts.read_text()
    directory.enrol(NAMES, [acme])
    assert seeds(directory)["tenant-acme.nk"] != old
    with pytest.raises(ConfigError, match="no user 'tenant-none'"):
        directory.enrol(NAMES, [], removed=["tenant-none"])


def test_what_the_operator_changed_stays_and_another_deployment_is_refused(tmp_path: Path) -> None:
    directory = SecureDirectory(tmp_path / "secure")
    directory.enrol(NAMES, [])
    directory.config.write_text("port: 1\ninclude ./accounts.conf\n")
    directory.enrol(NAMES, [], tls=Tls(cert="/c", key="/k"))
    assert directory.config.read_text() == "port: 1\ninclude ./accounts.conf\n"
    directory.enrol(NAMES, [])
    assert '"/c"' in directory.accounts.read_text()  # told once
    with pytest.raises(ConfigError, match="is of the deployment"):
        directory.enrol(OTHER, [])


@pytest.mark.parametrize(
    "member",
    [
        Member(role="tenant", tenant="A.B"),
        Member(role="tenant", tenant=">"),
        Member(role="worker", worker="*", model="m"),
        Member(role="worker", worker="w", model="m", pools=("a.>",)),
        Member(role="worker", worker="w", model=""),
    ],
)
def test_no_name_widens_a_permission(tmp_path: Path, member: Member) -> None:
    with pytest.raises(ConfigError):
        SecureDirectory(tmp_path).enrol(NAMES, [member])
