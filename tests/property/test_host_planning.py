"""Several hosts that plan from stale sight: a slot has one lease, memory is promised once, numbers come out right."""

import random
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.host.placing import choose_device
from headrace.host.planning import Claim, Drain, GiveUp, Holding, MarkFailed, Plan, Release, Sight, Start, plan
from headrace.schemas.instances import Device, GroupName, HostBeat, Slot, SlotName
from headrace.schemas.replicas import ReplicaGroup

MIB = 1 << 20
SMALL = GroupName("small", "default")
LARGE = GroupName("large", "default")
BEAT_S = 1.0


class Replica:
    """A slot as its host has it."""

    def __init__(self, claim: Claim) -> None:
        self.holding = Holding(group=claim.group, device=claim.device, need_bytes=claim.need_bytes)

    def set(self, **fields: object) -> None:
        self.holding = msgspec.structs.replace(self.holding, **fields)


class Host:
    """One agent: its devices, what it holds, and what it saw of the others when it last looked."""

    def __init__(self, name: str, devices: tuple[Device, ...]) -> None:
        self.name = name
        self.devices = devices
        self.replicas: dict[SlotName, Replica] = {}
        self.slots: dict[SlotName, Slot] = {}
        self.hosts: dict[str, HostBeat] = {}
        self.failed: set[tuple[GroupName, str]] = set()
        self.waiting: dict[SlotName, float] = {}
        self.avoided: set[tuple[GroupName, str, str]] = set()
        self.is_cut_off = False

    def promised(self) -> tuple[Device, ...]:
        promised = {device.name: 0 for device in self.devices}
        for replica in self.replicas.values():
            promised[replica.holding.device] += replica.holding.need_bytes
        return tuple(msgspec.structs.replace(each, promised_bytes=promised[each.name]) for each in self.devices)


class World:
    """The bucket and the hosts. `broken` generations, and those of `bare` hosts, never come up."""

    def __init__(self, hosts: list[Host]) -> None:
        self.hosts = {host.name: host for host in hosts}
        self.groups: dict[GroupName, ReplicaGroup] = {}
        self.slots: dict[SlotName, Slot] = {}
        self.failed: set[tuple[GroupName, str]] = set()
        self.proven: dict[GroupName, str] = {}
        self.broken: set[str] = set()
        self.bare: set[str] = set()
        self.now = 0.0

    def look(self, host: Host) -> None:
        """What the host reads of the bucket now."""
        if host.is_cut_off:
            host.slots = {}
            return
        host.slots = dict(self.slots)
        host.failed = set(self.failed)
        host.hosts = {
            each.name: HostBeat(host=each.name, epoch="e", devices=each.promised()) for each in self.hosts.values()
        }

    def act(self, host: Host) -> Plan:
        """Plan, and do it."""
        sight = Sight(
            host=host.name,
            now=self.now,
            beat_s=BEAT_S,
            groups=self.groups,
            slots=host.slots,
            hosts=host.hosts,
            failed=host.failed,
            proven=self.proven,
            devices=host.devices,
            holdings={name: replica.holding for name, replica in host.replicas.items()},
            avoided=host.avoided,
            waiting=host.waiting,
            may_claim=not host.is_cut_off,
        )
        planned = plan(sight)
        host.waiting = dict(planned.waiting)
        for action in planned.actions:
            self._do(host, action)
            self.check()
        return planned

    def _do(self, host: Host, action: object) -> None:
        match action:
            case Claim(slot=slot):
                assert slot not in host.replicas
                if slot not in self.slots:
                    host.replicas[slot] = Replica(action)
                    self._write(host, slot)
            case Start(slot=slot):
                host.replicas[slot].set(state="Starting", has_child=True)
                self._write(host, slot)
            case Drain(slot=slot):
                host.replicas[slot].set(state="Draining")
                self._write(host, slot)
            case Release(slot=slot) | GiveUp(slot=slot):
                replica = host.replicas.pop(slot)
                if replica.holding.is_leased and not host.is_cut_off:
                    del self.slots[slot]
                if isinstance(action, GiveUp):
                    host.avoided.add((slot.group, slot.generation, replica.holding.device))
            case MarkFailed(slot=slot):
                self.failed.add((slot.group, slot.generation))
            case _:
                raise AssertionError(action)

    def _write(self, host: Host, slot: SlotName) -> None:
        holding = host.replicas[slot].holding
        if holding.is_leased and not host.is_cut_off:
            self.slots[slot] = Slot(host=host.name, epoch="e", state=holding.state, failures=holding.failures)

    def progress(self, host: Host) -> None:
        """Its children come up, or fail, or are gone."""
        for name, replica in host.replicas.items():
            holding = replica.holding
            if holding.state == "Draining":
                replica.set(has_child=False)
            elif holding.state == "Starting" and (name.generation in self.broken or host.name in self.bare):
                replica.set(state="Failed", has_child=False, failures=holding.failures + 1, reason="it is broken")
                self._write(host, name)
            elif holding.state == "Starting":
                replica.set(state="Ready", failures=0)
                self._write(host, name)
                if self.groups.get(name.group) == holding.group:
                    self.proven[name.group] = name.generation

    def kill(self, name: str) -> None:
        """A host is gone, its leases expire."""
        del self.hosts[name]
        self.slots = {slot: lease for slot, lease in self.slots.items() if lease.host != name}

    def lose_leases(self, host: Host) -> None:
        """It could not renew them, and the broker dropped them."""
        for name, replica in host.replicas.items():
            if replica.holding.is_leased:
                replica.set(is_leased=False)
                del self.slots[name]

    def cut_off(self, host: Host) -> None:
        """It reaches nobody, and its leases expire; it does not know yet whether anybody takes them."""
        host.is_cut_off = True
        self.slots = {slot: lease for slot, lease in self.slots.items() if lease.host != host.name}

    def mend(self, host: Host) -> None:
        """It is back: what nobody has is its own again, the rest is lost."""
        host.is_cut_off = False
        for name, replica in host.replicas.items():
            if name in self.slots:
                replica.set(is_leased=False)
            else:
                self._write(host, name)

    def check(self) -> None:
        held: list[SlotName] = []
        for host in self.hosts.values():
            assert all(device.promised_bytes <= device.total_bytes for device in host.promised()), host.name
            if host.is_cut_off:
                continue
            mine = [name for name, replica in host.replicas.items() if replica.holding.is_leased]
            assert all(self.slots[name].host == host.name for name in mine)
            held += mine
        assert len(held) == len(set(held)), "two leases of one slot"

    def ready(self, group: GroupName) -> int:
        return sum(name.group == group and slot.state == "Ready" for name, slot in self.slots.items())

    def settle(self, rounds: int = 40) -> None:
        """Time passes, everybody looks and acts; at the end nobody has anything to do."""
        for _ in range(rounds):
            for host in self.hosts.values():
                self.look(host)
                self.act(host)
                self.progress(host)
            self.now += BEAT_S
        for host in self.hosts.values():
            self.look(host)
            assert self.act(host).actions == (), "it flaps"

    def wander(self, chance: random.Random, num_steps: int) -> Iterator[None]:
        """Anybody does anything, in any order, with sight as old as may be; pauses after each step."""
        for _ in range(num_steps):
            if not self.hosts:
                return
            host = chance.choice(list(self.hosts.values()))
            match chance.randrange(4):
                case 0:
                    self.look(host)
                case 1:
                    self.act(host)
                case 2:
                    self.progress(host)
                case _:
                    self.now += BEAT_S / 2
            yield


def group(mib: int | None, replicas: int, restarts: int = 0, uses: str = "gpu") -> ReplicaGroup:
    return msgspec.convert(
        {"engine": "sim", "memory_mib": mib, "replicas": replicas, "uses": uses, "restarts": restarts}, ReplicaGroup
    )


def gpu(name: str, mib: int) -> Device:
    return Device(name=name, kind="gpu", total_bytes=mib * MIB)


def fleet(sizes: list[list[int]]) -> list[Host]:
    return [
        Host(f"h{number}", tuple(gpu(f"h{number}g{place}", mib) for place, mib in enumerate(gpus)))
        for number, gpus in enumerate(sizes)
    ]


sizes = st.lists(st.lists(st.sampled_from([1000, 2000, 4000]), min_size=0, max_size=3), min_size=1, max_size=4)
chances = st.integers(0, 2**32).map(random.Random)


@settings(max_examples=40)
@given(sizes, chances, st.integers(0, 6), st.sampled_from([500, 1000, None]))
def test_with_stale_sight_memory_is_promised_once_and_the_wanted_number_comes_up_where_there_is_room(
    fleet_of: list[list[int]], chance: random.Random, wanted: int, mib: int | None
) -> None:
    world = World(fleet(fleet_of))
    world.groups[SMALL] = group(mib, wanted)
    for _ in world.wander(chance, 60):
        world.check()
    world.settle()
    room = sum(1 if mib is None else size // mib for gpus in fleet_of for size in gpus)
    assert world.ready(SMALL) == min(wanted, room)


@settings(max_examples=40)
@given(sizes, chances, st.integers(0, 4), st.integers(0, 4))
def test_two_groups_and_the_death_of_hosts(
    fleet_of: list[list[int]], chance: random.Random, small: int, large: int
) -> None:
    world = World(fleet(fleet_of))
    world.groups = {SMALL: group(500, small), LARGE: group(2000, large)}
    for number, _ in enumerate(world.wander(chance, 80)):
        world.check()
        if number == 40:
            world.kill(chance.choice(list(world.hosts)))
        if number == 20:
            world.lose_leases(chance.choice(list(world.hosts.values())))
    world.settle()
    for name, wanted, mib in ((SMALL, small, 500), (LARGE, large, 2000)):
        num_ready = world.ready(name)
        assert num_ready <= wanted
        if num_ready < wanted:
            free = [choose_device(group(mib, 1), host.promised()) for host in world.hosts.values()]
            assert free == [None] * len(free), "there is room"


@settings(max_examples=40)
@given(sizes, chances, st.integers(1, 4), st.booleans())
def test_an_update_never_takes_capacity_away_and_one_that_fails_stops(
    fleet_of: list[list[int]], chance: random.Random, wanted: int, is_broken: bool
) -> None:
    world = World(fleet(fleet_of))
    world.groups[SMALL] = old = group(500, wanted)
    world.settle()
    before = world.ready(SMALL)
    world.groups[SMALL] = new = group(500, wanted, restarts=1)
    if is_broken:
        world.broken.add(new.generation)
    for _ in world.wander(chance, 200):
        assert world.ready(SMALL) >= before
        coming = [slot for name, slot in world.slots.items() if name.generation == new.generation]
        assert sum(slot.state != "Ready" for slot in coming) <= max(1, wanted - before)
    world.settle()
    room = sum(size // 500 for gpus in fleet_of for size in gpus)
    generations = {name.generation for name in world.slots}
    assert world.ready(SMALL) == min(wanted, room)
    if room > wanted:
        assert generations == {old.generation if is_broken else new.generation}
    assert ((SMALL, new.generation) in world.failed) == (is_broken and room > before)


def test_a_host_that_lacks_a_file_does_not_stop_one_that_loads_for_longer() -> None:
    world = World(fleet([[4000], [4000]]))
    world.groups[SMALL] = group(None, 2)
    bare, loading = world.hosts.values()
    world.bare.add(bare.name)
    for _ in range(20):
        for host in (loading, bare):
            world.look(host)
            world.act(host)
        world.progress(bare)
        world.now += BEAT_S
    assert bare.avoided
    assert [replica.holding.state for replica in loading.replicas.values()] == ["Starting"]
    world.settle()
    assert world.ready(SMALL) == 1
    assert not world.failed


def test_where_no_host_brings_a_generation_up_it_is_stopped() -> None:
    world = World(fleet([[4000], [4000], [4000]]))
    world.groups[SMALL] = group(None, 3)
    world.bare |= set(world.hosts)
    world.settle()
    assert (SMALL, group(None, 3).generation) in world.failed
    assert not world.slots


@settings(max_examples=40)
@given(sizes, chances, st.integers(1, 6))
def test_who_was_cut_off_keeps_what_nobody_took_and_no_more(
    fleet_of: list[list[int]], chance: random.Random, wanted: int
) -> None:
    world = World(fleet(fleet_of))
    world.groups[SMALL] = group(500, wanted)
    world.settle()
    host = chance.choice(list(world.hosts.values()))
    before = set(host.replicas)
    world.cut_off(host)
    for _ in world.wander(chance, chance.randrange(40)):
        world.check()
    taken = set(world.slots)
    world.mend(host)
    assert {name for name, replica in host.replicas.items() if replica.holding.is_leased} == before - taken
    world.settle()
    room = sum(size // 500 for gpus in fleet_of for size in gpus)
    assert world.ready(SMALL) == min(wanted, room)
    assert sum(len(each.replicas) for each in world.hosts.values()) == min(wanted, room), "more than wanted"


@settings(max_examples=40)
@given(sizes, chances, st.integers(0, 4), st.integers(0, 4))
def test_numbers_go_up_down_and_to_zero(
    fleet_of: list[list[int]], chance: random.Random, first: int, second: int
) -> None:
    world = World(fleet(fleet_of))
    room = sum(size // 500 for gpus in fleet_of for size in gpus)
    for wanted in (first, second, 0):
        world.groups[SMALL] = group(500, wanted)
        for _ in world.wander(chance, 30):
            world.check()
        world.settle()
        assert world.ready(SMALL) == len(world.slots) == min(wanted, room)
        assert {name.index for name in world.slots} == set(range(min(wanted, room)))


def test_replicas_of_a_model_are_spread_over_hosts() -> None:
    world = World(fleet([[4000], [4000], [2000]]))
    world.groups[SMALL] = group(500, 6)
    world.settle()
    assert sorted(slot.host for slot in world.slots.values()) == ["h0", "h0", "h1", "h1", "h2", "h2"]


def test_what_is_whole_stays_whole_for_those_that_need_a_device_of_their_own() -> None:
    world = World(fleet([[4000, 4000]]))
    world.groups = {SMALL: group(500, 4), LARGE: group(None, 1)}
    world.settle()
    assert world.ready(LARGE) == 1
    assert world.ready(SMALL) == 4


def test_a_generation_that_was_ready_and_fails_here_is_left_to_another_host() -> None:
    world = World(fleet([[1000], [1000]]))
    world.groups[SMALL] = wanted = group(500, 1)
    world.settle()
    (slot,) = world.slots.values()
    first = world.hosts[slot.host]
    world.broken.add(wanted.generation)
    for replica in first.replicas.values():
        replica.set(state="Starting")
    for _ in range(20):
        world.look(first)
        world.act(first)
        world.progress(first)
        if not first.replicas:
            break
    assert world.failed == set()
    world.broken.clear()
    world.settle()
    assert [slot.host for slot in world.slots.values()] == ["h1" if first.name == "h0" else "h0"]


def test_without_room_beside_the_old_an_update_waits_and_says_so() -> None:
    world = World(fleet([[500], [500]]))
    world.groups[SMALL] = old = group(500, 2)
    world.settle()
    world.groups[SMALL] = group(500, 2, restarts=1)
    world.settle()
    assert {name.generation for name in world.slots} == {old.generation}
    host = world.hosts["h0"]
    assert world.act(host).reason == "no host has room for replica 0 of small (default): 500 MiB of a GPU"


@pytest.mark.parametrize("uses", ["gpu", "host"])
def test_what_uses_a_gpu_is_not_placed_in_the_hosts_memory(uses: str) -> None:
    world = World([Host("h0", (Device(name="host", kind="host", total_bytes=1000 * MIB),))])
    world.groups[SMALL] = group(500, 1, uses=uses)
    world.settle()
    assert world.ready(SMALL) == (1 if uses == "host" else 0)


def test_who_is_not_first_waits_a_beat_for_each_that_is() -> None:
    world = World(fleet([[1000], [4000], [2000]]))
    world.groups[SMALL] = group(500, 1)
    least, most, middle = world.hosts.values()
    for _ in range(2):
        for host in (least, middle):
            world.look(host)
            assert world.act(host).actions == ()
    world.now += BEAT_S
    assert world.act(least).actions == ()
    assert [type(action) for action in world.act(middle).actions] == [Claim]
    assert world.act(most).actions != (), "it is first, as far as it sees"
    assert [slot.host for slot in world.slots.values()] == [middle.name]


def test_while_an_update_is_stopped_old_workers_are_started_again_and_ready_ones_stay() -> None:
    world = World(fleet([[1000], [1000]]))
    world.groups[SMALL] = old = group(500, 2)
    world.settle()
    world.groups[SMALL] = new = group(500, 2, restarts=1)
    world.broken.add(new.generation)
    world.settle()
    assert world.failed == {(SMALL, new.generation)}
    (host, *_) = world.hosts.values()
    (name, replica), *_ = host.replicas.items()
    replica.set(state="Failed", has_child=False, failures=5)
    world.look(host)
    assert world.act(host).actions == (Start(name),)
    world.settle()
    assert world.ready(SMALL) == 2
    assert {each.generation for each in world.slots} == {old.generation}


def test_a_worker_that_came_up_stays_though_its_generation_was_given_up() -> None:
    world = World(fleet([[1000]]))
    world.groups[SMALL] = wanted = group(500, 1)
    world.settle()
    world.failed.add((SMALL, wanted.generation))
    world.settle()
    assert world.ready(SMALL) == 1
