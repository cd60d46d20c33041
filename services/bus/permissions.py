"""What each role may publish and subscribe to: one pure function for each, from the names of the deployment alone.

JetStream is asked by publishing, so a stream's or consumer's name in the subject of the call is what can be permitted.
What stands only in a call's body cannot be: `docs/security.md` says what follows from that for each role. A `*` at the
end of what may be subscribed to also permits `>` in its place (nats-server compares token by token).
"""

from collections.abc import Iterable
from typing import Any, Final, get_args

import msgspec

from headrace.schemas.subjects import DEFAULT_POOL, INBOX, SERVICE_INBOX_PREFIX, Names, Service, service_inbox

__all__ = ["Permissions", "gateway", "host", "monitor", "notices", "operator", "router", "tenant", "worker"]

_API: Final = "$JS.API"
_ANSWER_WITHIN: Final = "30s"


class Permissions(msgspec.Struct, frozen=True, kw_only=True):
    """Subjects that a user may publish and subscribe to; everything else is refused, and so is what is denied.

    `may_answer`: to each request it receives it may send one answer, to the subject the request names, within 30 s.
    """

    publish: tuple[str, ...] = ()
    deny_publish: tuple[str, ...] = ()
    subscribe: tuple[str, ...] = ()
    deny_subscribe: tuple[str, ...] = ()
    may_answer: bool = False

    def as_config(self) -> dict[str, Any]:
        """As nats-server's configuration has it."""
        publish: dict[str, Any] = {"allow": list(self.publish)} if self.publish else {"deny": [">"]}
        if self.deny_publish:
            publish["deny"] = list(self.deny_publish)
        subscribe = {"allow": list(self.subscribe)}
        if self.deny_subscribe:
            subscribe["deny"] = list(self.deny_subscribe)
        config: dict[str, Any] = {"publish": publish, "subscribe": subscribe}
        if self.may_answer:
            config["allow_responses"] = {"max": 1, "expires": _ANSWER_WITHIN}
        return config


def tenant(names: Names, tenant: str) -> Permissions:
    """A client of one tenant: sends its requests, asks about its jobs, hears its inboxes. No call of JetStream."""
    return Permissions(
        publish=(
            f"{names.prefix}.infer.{tenant}.>",
            f"{names.prefix}.cancel.{tenant}.>",
            f"{names.prefix}.status.{tenant}.>",
        ),
        subscribe=(f"{INBOX}.{tenant}.>",),
    )


def router(names: Names) -> Permissions:
    """Takes requests of every tenant in. It makes streams of configured models, and deliveries to tenants' inboxes."""
    return Permissions(
        publish=(
            *_look_at_deployment(names),
            f"{_API}.STREAM.INFO.*",
            f"{_API}.STREAM.CREATE.*",
            f"{_API}.STREAM.UPDATE.*",
            f"{_API}.STREAM.MSG.DELETE.*",
            f"{_API}.CONSUMER.INFO.*.*",
            f"{_API}.DIRECT.GET.*",
            *_read_log(names),
            *(f"{_API}.STREAM.MSG.GET.{stream}" for stream in _logs(names)),
            *(
                f"{_API}.CONSUMER.CREATE.{names.log_stream(shard)}.*.{names.log_filter(shard)}"
                for shard in range(names.num_shards)
            ),
            *(f"{_API}.CONSUMER.DELETE.{stream}.*" for stream in _logs(names)),
            *_read_keys(names.config_bucket, names.workers_bucket, names.usage_bucket),
            f"$KV.{names.usage_bucket}.*",
            *_append(names),
            f"{names.prefix}.jobs.*.*.*.*",
            f"{names.prefix}.tokenize.*",
            names.ctl("*"),
            f"{INBOX}.>",
        ),
        deny_publish=(f"{SERVICE_INBOX_PREFIX}.>",),
        subscribe=(
            names.infer_filter(),
            names.cancel("*", "*"),
            names.status("*", "*"),
            names.ended("*", "*"),
            f"$KV.{names.workers_bucket}.*",
            f"$KV.{names.config_bucket}.>",
            names.metrics(),
            *_service("router"),
        ),
        may_answer=True,
    )


def worker(names: Names, worker: str, model: str, pools: Iterable[str] = (DEFAULT_POOL,)) -> Permissions:
    """One worker of one model: fetches its model's jobs, appends to the log, writes its own heartbeat.

    `pools` are its own and those that its own lends to. It fills no queue but to hand a job over to a fallback model.
    """
    stream = names.jobs_stream(model)
    token = names.jobs_filter(model).removesuffix(".>").rpartition(".")[2]
    pools = tuple(pools)
    return Permissions(
        publish=(
            *_look_at_deployment(names),
            f"{_API}.STREAM.INFO.{stream}",
            f"{_API}.CONSUMER.LIST.{stream}",
            f"{_API}.CONSUMER.INFO.{stream}.*",
            f"{_API}.CONSUMER.MSG.NEXT.{stream}.*",
            *(f"{_API}.CONSUMER.CREATE.{stream}.*.{names.prefix}.jobs.{token}.{pool}.*.*" for pool in pools),
            f"{_API}.DIRECT.GET.{stream}",
            f"$JS.ACK.{stream}.>",
            *(f"{_API}.DIRECT.GET.{log}" for log in _logs(names)),
            *_read_log(names),
            f"{_API}.DIRECT.GET.KV_{names.workers_bucket}",
            f"{_API}.DIRECT.GET.KV_{names.config_bucket}",
            *_read_keys(names.config_bucket, names.workers_bucket),
            f"$KV.{names.workers_bucket}.{worker}",
            *_append(names),
            f"{names.prefix}.dead.*.{token}.*",
            f"{names.prefix}.jobs.*.*.*.*",
            *(names.wake_pool(model, pool) for pool in pools),
            names.ctl("*"),
        ),
        subscribe=(
            names.ctl(worker),
            names.tokenize(model),
            *(names.wake_pool(model, pool) for pool in pools),
            f"$KV.{names.workers_bucket}.*",
            f"$KV.{names.config_bucket}.>",
            names.metrics(),
            *_service("worker", worker),
        ),
        may_answer=True,
    )


def monitor(names: Names) -> Permissions:
    """Evicts, hands over, ends what is overdue, tidies the log, decides how many replicas there shall be."""
    return Permissions(
        publish=(
            *_look_at_deployment(names),
            f"{_API}.STREAM.NAMES",
            f"{_API}.STREAM.INFO.*",
            f"{_API}.STREAM.MSG.DELETE.*",
            *(f"{_API}.STREAM.PURGE.{stream}" for stream in _logs(names)),
            f"{_API}.CONSUMER.LIST.*",
            f"{_API}.CONSUMER.INFO.*.*",
            *(f"{_API}.CONSUMER.DELETE.{stream}.*" for stream in _logs(names)),
            f"{_API}.DIRECT.GET.*",
            *_read_log(names),
            *(f"{_API}.STREAM.MSG.GET.{stream}" for stream in _logs(names)),
            *_read_keys(names.config_bucket, names.workers_bucket),
            "$JS.ACK.>",
            f"$KV.{names.workers_bucket}.*",
            f"$KV.{names.instances_bucket}.scale.*.*",
            *_append(names),
            f"{names.prefix}.dead.*.*.*",
            f"{names.prefix}.jobs.*.*.*.*",
            f"{names.prefix}.wake.*.*.*.*",
            names.ctl("*"),
            names.metrics(),
        ),
        subscribe=(
            f"{names.prefix}.wake.>",
            names.ended("*", "*"),
            names.monitor_state(),
            f"$KV.{names.workers_bucket}.*",
            f"$KV.{names.config_bucket}.>",
            names.metrics(),
            *_service("monitor"),
        ),
        may_answer=True,
    )


def gateway(names: Names) -> Permissions:
    """A client of every tenant, which reads the configuration beside that and keeps files and batches."""
    files = names.files_stream
    return Permissions(
        publish=(
            *_look_at_deployment(names),
            f"{_API}.STREAM.NAMES",
            f"{_API}.DIRECT.GET.KV_{names.config_bucket}",
            f"{_API}.DIRECT.GET.KV_{names.batches_bucket}",
            *_read_keys(names.config_bucket, names.batches_bucket),
            f"$KV.{names.batches_bucket}.>",
            f"{_API}.DIRECT.GET.{names.batch_stream}",
            f"{_API}.DIRECT.GET.{names.batch_stream}.{names.batch_filter()}",
            f"{_API}.STREAM.PURGE.{names.batch_stream}",
            names.batch_filter(),
            f"{_API}.DIRECT.GET.{files}",
            f"{_API}.DIRECT.GET.{files}.$O.{names.files_store}.>",
            f"{_API}.STREAM.PURGE.{files}",
            f"$O.{names.files_store}.>",
            names.infer_filter(),
            names.cancel("*", "*"),
            names.status("*", "*"),
        ),
        subscribe=(
            f"{INBOX}.*.*",  # jobs' inboxes of all tenants; those of services are deeper
            f"$KV.{names.config_bucket}.>",
            names.metrics(),
            *_service("gateway"),
        ),
        # The broker takes the last `*` above to permit `_INBOX._svc.>`; what is denied is kept from that one too.
        deny_subscribe=tuple(f"{service_inbox(each)}.>" for each in get_args(Service) if each != "gateway"),
        may_answer=True,
    )


def host(names: Names) -> Permissions:
    """A host agent and the workers it starts, which share its credential: any model's, under any id.

    It makes the streams of the models that it starts workers of.
    """
    return Permissions(
        publish=(
            *_look_at_deployment(names),
            f"{_API}.STREAM.INFO.*",
            f"{_API}.STREAM.CREATE.*",
            f"{_API}.CONSUMER.LIST.*",
            f"{_API}.CONSUMER.INFO.*.*",
            f"{_API}.CONSUMER.MSG.NEXT.*.*",
            f"{_API}.CONSUMER.CREATE.*.*.{names.prefix}.jobs.*.*.*.*",
            f"{_API}.DIRECT.GET.*",
            "$JS.ACK.>",
            *_read_log(names),
            *_read_keys(names.config_bucket, names.workers_bucket, names.instances_bucket),
            f"$KV.{names.workers_bucket}.*",
            f"$KV.{names.instances_bucket}.>",
            *_append(names),
            f"{names.prefix}.dead.*.*.*",
            f"{names.prefix}.jobs.*.*.*.*",
            f"{names.prefix}.wake.*.*.*.*",
            names.ctl("*"),
        ),
        subscribe=(
            names.ctl("*"),
            f"{names.prefix}.tokenize.*",
            f"{names.prefix}.wake.*.*.*.*",
            f"$KV.{names.workers_bucket}.*",
            f"$KV.{names.config_bucket}.>",
            f"$KV.{names.instances_bucket}.>",
            names.metrics(),
            *_service("host"),
            *_service("worker"),
        ),
        may_answer=True,
    )


def operator(names: Names) -> Permissions:
    """The command line, which may start any part too: everything of the deployment, and JetStream as a whole."""
    buckets = _buckets(names)
    return Permissions(
        publish=(
            f"{names.prefix}.>",
            f"{_API}.>",
            "$JS.ACK.>",
            *(f"$KV.{bucket}.>" for bucket in buckets),
            f"$O.{names.files_store}.>",
            "$SRV.>",
            f"{INBOX}.>",
        ),
        subscribe=(f"{names.prefix}.>", *(f"$KV.{bucket}.>" for bucket in buckets), "$SRV.>", f"{INBOX}.>"),
    )


def notices() -> Permissions:
    """A monitor's user of the system account: hears of connections that end, and nothing else."""
    return Permissions(subscribe=("$SYS.ACCOUNT.*.DISCONNECT",))


def _logs(names: Names) -> list[str]:
    return [names.log_stream(shard) for shard in range(names.num_shards)]


def _buckets(names: Names) -> tuple[str, ...]:
    return (
        names.workers_bucket,
        names.config_bucket,
        names.usage_bucket,
        names.instances_bucket,
        names.batches_bucket,
    )


def _look_at_deployment(names: Names) -> list[str]:
    """What every service looks at as it starts: whether JetStream is there, and the streams that all share."""
    kept = (names.dead_stream, names.batch_stream, names.files_stream)
    streams = [*_logs(names), *kept, *(f"KV_{bucket}" for bucket in _buckets(names))]
    return [f"{_API}.INFO", *(f"{_API}.STREAM.INFO.{stream}" for stream in streams)]


def _read_log(names: Names) -> list[str]:
    """The last event of a job."""
    return [
        f"{_API}.DIRECT.GET.{names.log_stream(shard)}.{names.log_filter(shard)}" for shard in range(names.num_shards)
    ]


def _read_keys(*buckets: str) -> list[str]:
    """Single keys."""
    return [f"{_API}.DIRECT.GET.KV_{bucket}.$KV.{bucket}.>" for bucket in buckets]


def _append(names: Names) -> list[str]:
    """Events to any job's log, and the notice of its end."""
    return [*(names.log_filter(shard) for shard in range(names.num_shards)), names.ended("*", "*")]


def _own(service: Service, identity: str = "") -> list[str]:
    return [f"{service_inbox(service, identity)}.>"]


def _service(service: Service, identity: str = "") -> list[str]:
    """Its own inboxes, and the services protocol under its name."""
    name = f"headrace-{service}"
    verbs = [f"$SRV.{verb}" for verb in ("PING", "INFO", "STATS")]
    return [*_own(service, identity), *(f"{verb}{of}" for verb in verbs for of in ("", f".{name}", f".{name}.*"))]
