"""Calls to actors that die, on a pretended Ray whose every event is drawn: who is blamed, and what is made again."""

from __future__ import annotations

import random
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayActorError

from actors import workers
from actors.actor_pool import ActorPool
from actors.calls import Running, Started
from actors.process import Arrival, ResourceShare
from actors.workers import ActorsLost, Workers
from rayfed.errors import ResourceError
from rayfed.simulation.executors.base import Call, Crashed
from rayfed.simulation.machine import Machine

NODE_DIED = "The actor died because its node has died. Node Id: 17"


class Ref:
    """A result, which is there when its actor has come to it."""

    value: Any = None

    def __init__(self) -> None:
        self.there = False

    def be(self, value: Any) -> None:
        self.value, self.there = value, True


@dataclass(eq=False)
class Actor:
    """A pretended actor, which is up from the beginning."""

    node: int
    queue: deque[tuple[Ref, Any]] = field(default_factory=deque)
    dead: Exception | None = None

    @property
    def work(self) -> Actor:
        return self

    def options(self, num_returns: int) -> Actor:
        return self

    def remote(self, what: Any) -> Ref:
        ref = Ref()
        if self.dead:
            ref.be(self.dead)
        self.queue.append((ref, what))
        return ref

    def die(self, error: Exception) -> None:
        """End all its calls, the last first: Ray says nothing of their order."""
        self.dead = self.dead or error
        while self.queue:
            self.queue.pop()[0].be(self.dead)


@dataclass
class World:
    """Actors on two nodes; each call takes memory while it is worked at, and some crash."""

    draw: random.Random
    memory: int = 10**9
    crashing: frozenset[int] = frozenset()
    kills: int = 0
    """Actors that somebody kills at random moments."""
    node_deaths: int = 0
    most: int = 0
    """Actors that the cluster may have room for, as it grows and shrinks; 0 for a room that stays."""
    actors: list[Actor] = field(default_factory=list)
    executed: list[int] = field(default_factory=list)

    def acquire(self, *_: Any) -> tuple[Actor, Ref]:
        actor, ready = Actor(self.draw.randrange(2)), Ref()
        ready.be(Arrival(Machine("Actor", "", "cpu"), str(actor.node)))
        self.actors.append(actor)
        return actor, ready

    def release(self, actor: Actor, keep: bool) -> None:
        actor.die(RayActorError(error_msg="killed"))

    def wait(self, refs: list[Ref], num_returns: int = 1, timeout: float | None = None) -> tuple[list[Ref], list[Ref]]:
        while not any(ref.there for ref in refs):
            if timeout == 0:
                return [], refs
            self.step()
        return [self.draw.choice([ref for ref in refs if ref.there])], []

    def get(self, ref: Ref) -> Any:
        assert ref.there, "nothing may be waited for but by `wait`, which looks at the clock"
        if isinstance(ref.value, Exception):
            raise ref.value
        return ref.value

    def step(self) -> None:
        """Something happens: somebody's kill, a node's death, the memory killer, or the end of a call."""
        living = [actor for actor in self.actors if not actor.dead]
        busy = [actor for actor in living if actor.queue]
        if self.kills and self.draw.random() < 0.2:
            self.kills -= 1
            self.draw.choice(living).die(RayActorError(error_msg="killed"))
        elif self.node_deaths and self.draw.random() < 0.2:
            self.node_deaths -= 1
            node = self.draw.randrange(2)
            for actor in living:
                if actor.node == node:
                    actor.die(RayActorError(error_msg=NODE_DIED))
        elif sum(actor.queue[0][1][1] for actor in busy) > self.memory:
            self.draw.choice(living).die(OutOfMemoryError("the node runs low on memory"))  # an innocent one, maybe
        elif busy:
            actor = self.draw.choice(busy)
            ref, (number, _) = actor.queue[0]
            self.executed.append(number)
            if number in self.crashing:
                actor.die(RayActorError(error_msg="connection error code 2. End of file."))
            else:
                actor.queue.popleft()
                ref.be(number)


def played(
    world: World, size: int, needs: list[int], crashes: int | None, ahead: bool = False
) -> tuple[dict[int, Any], Workers]:
    """Results by call; `needs` says what memory each takes. Of what is handed out `ahead` much happens unheard."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(workers, "ray", world)
        patched.setattr(ActorPool, "acquire", world.acquire)
        patched.setattr(ActorPool, "release", world.release)

        def look(lost: bool) -> None:
            if world.most and (lost or world.draw.random() < 0.2):
                pool.resize(world.draw.randint(1, world.most), {"0"} if world.draw.random() < 0.5 else {"0", "1"})
                pool.lend(world.draw.random() < 0.5)
                assert sum(not actor.dead for actor in world.actors) <= pool.abreast

        pool = Workers(ActorPool(), size, look=look)
        calls = [Call("work", ((i, need),), i, crashes=crashes) for i, need in enumerate(needs)]
        run = pool.run(calls, ahead=ahead)
        if ahead:
            assert sum(len(actor.queue) for actor in world.actors) == len(calls)
            for _ in range(world.draw.randrange(2 * len(calls))):
                if any(not actor.dead for actor in world.actors):
                    world.step()
        done = list(run)
    results = {call.tag: result for call, result, *_ in done}
    assert len(done) == len(results), "no call comes twice"
    return results, pool


@given(
    st.randoms(use_true_random=False),
    st.integers(1, 5),
    st.integers(1, 30),
    st.sets(st.integers(0, 29), max_size=3),
    st.sampled_from([0, 1]),
    st.booleans(),
)
def test_who_crashes_is_blamed_and_nobody_else(
    draw: random.Random, size: int, calls: int, crashing: set[int], kills: int, ahead: bool
) -> None:
    """Not who waited behind it, nor who was at work when somebody killed an actor, or a node died with all of its."""
    world = World(draw, crashing=frozenset(crashing), kills=kills, node_deaths=4)
    results, _ = played(world, size, [0] * calls, kills, ahead)
    bad = crashing & set(range(calls))
    assert {i for i, result in results.items() if isinstance(result, Crashed)} == bad
    assert all(results[i] == i for i in set(range(calls)) - bad)
    assert not any(results[i].memory for i in bad)


@given(
    st.randoms(use_true_random=False),
    st.integers(1, 6),
    st.lists(st.integers(1, 4), min_size=1, max_size=30),
    st.sets(st.integers(0, 29), max_size=2),
    st.booleans(),
)
def test_who_needs_more_memory_than_there_is_is_found(
    draw: random.Random, size: int, needs: list[int], greedy: set[int], ahead: bool
) -> None:
    """Whoever Ray's memory killer chose: fewer go on at once, down to one, and none of the others is blamed."""
    bad = greedy & set(range(len(needs)))
    world = World(draw, memory=4)
    results, pool = played(world, size, [5 if i in bad else need for i, need in enumerate(needs)], 1, ahead)
    assert {i for i, result in results.items() if isinstance(result, Crashed)} == bad
    assert all(results[i].memory for i in bad)
    assert all(results[i] == i for i in set(range(len(needs))) - bad)
    assert 1 <= pool.abreast <= size


@pytest.mark.engine
@given(
    st.randoms(use_true_random=False),
    st.integers(1, 5),
    st.integers(1, 8),
    st.integers(1, 60),
    st.sets(st.integers(0, 59), max_size=2),
    st.booleans(),
)
def test_a_pool_that_grows_and_shrinks_does_every_call_and_blames_nobody_for_it(
    draw: random.Random, size: int, most: int, calls: int, crashing: set[int], ahead: bool
) -> None:
    world = World(draw, crashing=frozenset(crashing), node_deaths=4, most=most)
    results, _ = played(world, size, [0] * calls, 0, ahead)
    assert {i for i, result in results.items() if isinstance(result, Crashed)} == crashing & set(range(calls))


def test_calls_begin_ahead_where_an_actor_has_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after its node's death: the others do them, and nobody waits for it."""

    def cramped(*_: Any) -> tuple[Actor, Ref]:
        actor, ready = world.acquire()
        return actor, Ref() if len(world.actors) == 2 else ready

    world = World(random.Random(3))
    monkeypatch.setattr(workers, "ray", world)
    monkeypatch.setattr(ActorPool, "acquire", cramped)
    monkeypatch.setattr(ActorPool, "release", world.release)
    run = Workers(ActorPool(), 3).run([Call("work", ((i, 0),), i) for i in range(6)], ahead=True)
    assert [len(actor.queue) for actor in world.actors] == [3, 0, 3]
    assert {done.call.tag for done in run} == set(range(6))


@pytest.mark.parametrize("taken", [0, 3, 6])
def test_new_calls_do_not_wait_behind_what_was_begun_ahead_and_left(
    taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a round is played again: their time would be up before they are begun."""
    world = World(random.Random(3))
    monkeypatch.setattr(workers, "ray", world)
    monkeypatch.setattr(ActorPool, "acquire", world.acquire)
    monkeypatch.setattr(ActorPool, "release", world.release)
    pool = Workers(ActorPool(), 2)
    left = pool.run([Call("work", ((i, 0),), i) for i in range(6)], ahead=True)
    for _ in range(taken):
        next(left)
    run = pool.run([Call("work", ((6 + i, 0),), 6 + i) for i in range(4)], ahead=True)
    assert [[number for _, (number, _) in actor.queue] for actor in world.actors if not actor.dead] == [[6, 8], [7, 9]]
    assert len(world.actors) == 2 + 2 * (taken < 6), "actors that have done all are kept"
    assert {done.call.tag for done in run} == {6, 7, 8, 9}


def test_a_pool_has_fewer_actors_while_another_run_needs_room(monkeypatch: pytest.MonkeyPatch) -> None:
    world, share = World(random.Random(3)), ResourceShare(1, 0)
    monkeypatch.setattr(workers, "ray", world)
    monkeypatch.setattr(ActorPool, "acquire", world.acquire)
    monkeypatch.setattr(ActorPool, "release", world.release)
    pool = Workers(ActorPool(), 4, object, share, reserved=share)
    pool.wait()
    for left in (3, 2, 1, 1):
        pool.lend(True)
        assert [not actor.dead for actor in world.actors] == [True] * left + [False] * (4 - left)
    pool.lend(False)
    assert sum(not actor.dead for actor in world.actors) == 4
    pool.lend(True)
    assert not world.actors[0].dead, "the reserved share is kept"
    assert sum(not actor.dead for actor in world.actors) == 1, "actors that wait for room end at once"
    assert {done.call.tag for done in pool.run([Call("work", ((i, 0),), i) for i in range(6)])} == set(range(6))


def test_actors_whose_node_is_gone_end_before_others(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(random.Random(3))
    monkeypatch.setattr(workers, "ray", world)
    monkeypatch.setattr(ActorPool, "acquire", world.acquire)
    monkeypatch.setattr(ActorPool, "release", world.release)
    pool = Workers(ActorPool(), 12)
    pool.wait()
    there = sum(actor.node == 1 for actor in world.actors)
    assert 2 < there < 12
    pool.resize(there, {"1"})
    assert {actor.node for actor in world.actors if not actor.dead} == {1}
    pool.resize(12, {"1"})
    pool.resize(there, {"1"})  # nor is one ended that is up for one that is not
    assert sum(not actor.dead for actor in world.actors[:12]) == there


@given(st.lists(st.tuples(st.sampled_from(["add", "end", "lose"]), st.integers(0, 3), st.sampled_from([None, 2, 5]))))
def test_bookkeeping_is_that_of_a_list_for_each_actor(events: list[tuple[str, int, int | None]]) -> None:
    now, lists = 0.0, {slot: list[tuple[Ref, int | None]]() for slot in range(4)}
    began = dict.fromkeys(lists, 0.0)
    running: Any = Running(lists)
    for what, slot, limit in events:
        now, own = now + 1, lists[slot]
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("actors.calls.monotonic", lambda now=now: now)
            if what == "add" and len(own) < 2:
                own.append((Ref(), limit))
                running.add(own[-1][0], Started(slot, None, Call("work", (), limit=limit), 0, []))  # type: ignore[arg-type]
                began[slot] = began[slot] if len(own) == 2 else now
            elif what != "add" and own:
                running.pop(own.pop(0)[0])
                began[slot] = now
                if what == "lose":
                    assert [one.call.limit for one in running.behind(slot)] == [limit for _, limit in own]
                    own.clear()
        heads = {own[0]: slot for slot, own in lists.items() if own}
        assert sorted(map(id, running)) == sorted(id(ref) for ref, _ in heads)
        ends = [(began[slot] + limit, ref) for (ref, limit), slot in heads.items() if limit]
        assert running.next_end() in ends if ends else running.next_end() is None
        assert not ends or running.next_end()[0] == min(end for end, _ in ends)
        assert running.freest(lists) == min((len(own), slot) for slot, own in lists.items())


def test_an_event_costs_the_same_among_thousands_of_actors(monkeypatch: pytest.MonkeyPatch) -> None:
    class Prompt(World):
        """A world whose calls are done as soon as somebody waits for them."""

        def wait(self, refs: list[Ref], num_returns: int, timeout: float | None = None) -> tuple[list[Ref], list[Ref]]:
            refs[0].there = True
            return refs[:1], []

    world, actors = Prompt(random.Random(3)), 8000
    monkeypatch.setattr(workers, "ray", world)
    monkeypatch.setattr(ActorPool, "acquire", world.acquire)
    monkeypatch.setattr(ActorPool, "release", world.release)
    pool = Workers(ActorPool(), actors)
    pool.wait()
    began = time.process_time()
    run = pool.run([Call("work", ((i, 0),), i, node=str(i % 2)) for i in range(4 * actors)])
    for _ in range(1000):
        next(run)
    assert sum(len(actor.queue) for actor in world.actors) == 2 * actors + 999
    assert time.process_time() - began < 6, "seconds; half a minute where each goes through all actors"


def test_fewer_go_on_at_once_where_memory_is_short_and_no_fewer_than_need_be() -> None:
    results, pool = played(World(random.Random(3), memory=2), 8, [1] * 40, crashes=None)
    assert results == {i: i for i in range(40)}
    assert pool.abreast == 2


def test_a_call_that_nobody_searches_ends_the_run() -> None:
    world = World(random.Random(3), crashing=frozenset({4}))
    with pytest.raises(ActorsLost, match=r"4 actors .*`work`.*End of file"):
        played(world, 2, [0] * 9, crashes=None)
    assert world.executed.count(4) == 4
    assert issubclass(ActorsLost, ResourceError)  # a message, and exit code 2


def test_actors_that_die_as_they_start_again_and_again_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def frail(*_: Any) -> tuple[Actor, Ref]:
        actor, ready = world.acquire()
        ready.be(OutOfMemoryError("the node runs low on memory"))
        return actor, ready

    world = World(random.Random(3))
    monkeypatch.setattr(workers, "ray", world)
    monkeypatch.setattr(ActorPool, "acquire", frail)
    monkeypatch.setattr(ActorPool, "release", world.release)
    with pytest.raises(ActorsLost, match=r"4 actors .*low on memory"):
        Workers(ActorPool(), 2).wait()


def test_rays_own_error_of_a_dead_actor_is_one_of_those_that_are_looked_for() -> None:
    assert isinstance(ActorDiedError(), workers.DEATHS)
    assert isinstance(OutOfMemoryError(""), workers.DEATHS)
    assert not issubclass(OutOfMemoryError, RayActorError)  # why it is named
