"""The plan of local updates: what travels together, when, among whom, and in how many bytes.

A plan is pure: it is made of parameters' names and shapes, a method and a number of replicas, and no tensor is
needed. The engine (`local_updates`) executes it; rules, predictions, the planner, the simulator and summaries read it.
Its constructor refuses settings that cannot work.

    fragment   parameters that are exchanged together, each turn in one message
    section    a run of a fragment's values that the same replicas train (all of them, unless parameters are sliced)
    turn       one exchange of one fragment; turns of a fragment are H steps apart and numbered from 0
    group      the replicas that average at a turn
"""

from __future__ import annotations

import collections
import dataclasses
import fnmatch
import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from lowcomm.choices import check_settings, choose
from lowcomm.codecs import check_feedback, in_one_piece, make_codec
from lowcomm.comm.encoded import encoded, read_back
from lowcomm.comm.shares import Section, encoded_mean_in_shares, owned_mean_bytes
from lowcomm.methods.bases import Basis
from lowcomm.methods.config import MethodConfig
from lowcomm.methods.means import Mean
from lowcomm.methods.outer import OuterOptimizer
from lowcomm.methods.partial import Piece, pieces
from lowcomm.methods.peers import Peers
from lowcomm.methods.schedule import Points
from lowcomm.methods.streaming import Schedule, balanced, layer_fragments, layer_of
from lowcomm.settings import ConfigError, build, check_bounds

#: What the bytes of an exchange are billed as: the outer gradients' mean, and NoLoCo's slow weights ahead of it.
OUTER, SLOW_WEIGHTS = "outer", "slow weights"


@dataclass(frozen=True)
class Fragment:
    """Parts of parameters that are exchanged together.

    Attributes:
        pieces: the parts, in the order in which they travel: what all replicas train first, then slice by slice.
        sections: the runs of values that they make up, in the same order: (number of values, replicas that train them).
            Each is of all parts with the same owners, or of one where the codec goes by parameters.
        numel: the number of values in all.
        offset: t_p, the number of steps by which its turns lie behind the first fragment's.
    """

    pieces: tuple[Piece, ...]
    sections: tuple[Section, ...]
    numel: int
    offset: int

    @functools.cached_property
    def alike(self) -> dict[Section, int]:
        """The sections that differ, each with the number of sections like it."""
        return dict(collections.Counter(self.sections))


@dataclass(frozen=True)
class Turn:
    """One turn of a fragment in a run.

    step: the step after which it is sent, from 1. number: how many turns the fragment has had before. is_closing:
    whether it is the exchange that closes the run after its last step, besides the fragment's turns by the schedule.
    """

    step: int
    fragment: int
    number: int
    is_closing: bool


#: Methods that go together with so many replicas, as each stage of each run that is planned asks; as text, in which 1,
#: 1.0 and True differ.
_CHECKED: set[tuple[str, int]] = set()


def check_method(method: MethodConfig, replicas: int) -> None:
    """Raise ConfigError where the settings of a method do not go together, whatever the model."""
    if (asked := (repr(method), replicas)) in _CHECKED:
        return
    build(MethodConfig, dataclasses.asdict(method), "method")  # refuses a value that is not of its kind
    check_bounds("method", method)
    defaults = MethodConfig(method.exchange)
    check_settings(Peers, method.peers, "method.peers", method, defaults)
    check_settings(OuterOptimizer, method.outer, "method.outer", method, defaults)
    check_settings(Mean, method.mean, "method.mean", method, defaults)
    choose(Basis, method.basis, "method.basis")
    choose(Peers, method.peers, "method.peers").check(method, replicas)
    _check_fragments(method, defaults)
    _check_slices(method, defaults, replicas)
    _check_outer(method, replicas)
    _check_messages(method, defaults, replicas)
    if len(method.overlap_steps) not in (1, replicas):
        raise ConfigError(
            f"method.overlap_steps = {list(method.overlap_steps)} must hold one value, or one for each of"
            f" {replicas} replicas"
        )
    for tau in method.overlap_steps:
        if not 0 <= tau < method.sync_every_steps:
            raise ConfigError(
                f"method.overlap_steps = {tau} must be at least 0 and below sync_every_steps ="
                f" {method.sync_every_steps}: a fragment is back before it is sent again"
            )
    _CHECKED.add(asked)


def _points(method: MethodConfig) -> dict[str, Points]:
    """Return the points that numbers of the outer optimizer follow, by the name of the setting that holds them."""
    found = {key: getattr(method, key) for key in ("outer_lr_shape", "outer_momentum_points")}
    return {key: Points(texts, f"method.{key}") for key, texts in found.items() if texts}


def _with_points(method: MethodConfig, now: Mapping[str, float]) -> MethodConfig:
    """Return the method with the numbers that its points give at one step; `now` has them by the points' setting."""
    lr = method.outer_lr * now.get("outer_lr_shape", 1.0)
    return dataclasses.replace(
        method, outer_lr=lr, outer_momentum=now.get("outer_momentum_points", method.outer_momentum)
    )


def _check_outer(method: MethodConfig, replicas: int) -> None:
    """Raise ConfigError where the outer optimizer does not work with the method, at any point of the run."""
    cls, points = choose(OuterOptimizer, method.outer, "method.outer"), _points(method)
    cls.check(method, replicas)
    for key, of in points.items():
        for value in of.values:
            changed = _with_points(method, {key: value})
            try:
                check_bounds("method", changed)
                cls.check(changed, replicas)
            except ConfigError as error:
                raise ConfigError(f"method.{key}: {error}") from None


def _members(method: MethodConfig, replicas: int) -> int:
    """Return how many replicas average with each other at a turn; the least where they do not divide into groups."""
    return method.group_size if "group_size" in choose(Peers, method.peers, "method.peers").settings else replicas


def check_mean(method: MethodConfig, members: int) -> None:
    """Raise ConfigError where a group of `members` is too small for the method's mean.

    Where replicas train slices, it counts how many of them own each value.
    """
    choose(Mean, method.mean, "method.mean").check(method, members // method.slices)


def _check_messages(method: MethodConfig, defaults: MethodConfig, replicas: int) -> None:
    if make_codec(method.codec, method.codec_keep, where="method.codec").lossless:
        for key in ("error_feedback", "basis"):
            if getattr(method, key) != getattr(defaults, key):
                raise ConfigError(
                    f"method.{key} = {getattr(method, key)} means nothing with method.codec = {method.codec}, which"
                    " loses nothing"
                )
    if method.error_feedback:
        check_feedback(method.codec, method.codec_keep, "method")
    check_mean(method, _members(method, replicas))
    if not method.byzantine and method.byzantine_factor != defaults.byzantine_factor:
        raise ConfigError(f"method.byzantine_factor = {method.byzantine_factor} means nothing with byzantine = 0")
    if method.byzantine >= max(1, replicas):
        raise ConfigError(f"method.byzantine = {method.byzantine} must leave one or more of {replicas} replicas honest")
    outer = choose(OuterOptimizer, method.outer, "method.outer").of(method)
    about = {key: (getattr(method, key), getattr(defaults, key)) for key in ("byzantine", "mean")}
    about["boundary.replicas"] = method.boundary.replicas, 0
    for key, (value, default) in about.items():
        if outer.sends_parameters and value != default:
            raise ConfigError(
                f"method.{key} = {value} is about outer gradients: not with method.outer = {method.outer}, of which"
                " parameters travel"
            )


def _check_fragments(method: MethodConfig, defaults: MethodConfig) -> None:
    layered = method.fragments in ("sequential", "strided")
    belongs = {"fragment_patterns": "patterns", "fragment_count": "balanced"}
    meant_by = {"layers_per_fragment": layered} | {key: method.fragments == kind for key, kind in belongs.items()}
    for key, meant in meant_by.items():
        if not meant and getattr(method, key) != getattr(defaults, key):
            raise ConfigError(f"method.{key} means nothing with method.fragments = {method.fragments}")
    if method.fragments == "patterns" and not method.fragment_patterns:
        raise ConfigError("method.fragments = patterns needs method.fragment_patterns: one for each fragment")
    if method.trainable == "next_fragment" and method.fragments in ("whole", "slices"):
        raise ConfigError(f"method.trainable = next_fragment means nothing with method.fragments = {method.fragments}")


def _check_slices(method: MethodConfig, defaults: MethodConfig, replicas: int) -> None:
    sliced = method.sliced
    if method.trainable != "slice":
        for key in ("slices", "sliced", "input_gradients"):
            if getattr(method, key) != getattr(defaults, key):
                raise ConfigError(f"method.{key} means nothing with method.trainable = {method.trainable}")
        if method.fragments == "slices":
            raise ConfigError(f"method.fragments = slices means nothing with method.trainable = {method.trainable}")
        return
    if not sliced or len(set(sliced)) < len(sliced) or {"mlp", "layers"} <= set(sliced):
        raise ConfigError(f"method.sliced = {list(sliced)} must name what is sliced, once: mlp or layers, heads, out")
    if replicas % method.slices:
        raise ConfigError(f"method.slices = {method.slices} does not divide replicas = {replicas}")
    sends_parameters = choose(OuterOptimizer, method.outer, "method.outer").of(method).sends_parameters
    if sends_parameters and method.slices == _members(method, replicas) < replicas:
        raise ConfigError(
            f"method.group_size = {method.group_size} must be at least twice method.slices = {method.slices} with"
            f" method.outer = {method.outer}, of which parameters travel: else owners of a slice never meet"
        )
    if method.input_gradients != "all" and "mlp" not in sliced:
        raise ConfigError(f"method.input_gradients = {method.input_gradients} needs mlp in method.sliced")
    if method.input_gradients != "all" and method.slices == 1:
        raise ConfigError(f"method.input_gradients = {method.input_gradients} needs two slices or more")


class Plan:
    """The exchanges between replicas of one model, or of one stage of it.

    Args:
        shapes: the shapes of the parameters, by name, in the model's order.
        method: the choices. replicas: how many take part.
        seed: decides random groups; the same on all replicas.
        layers: the number of layers of the whole model, where `shapes` are a stage's; only for sliced = layers.

    Attributes: `fragments` in the order of their numbers, `schedule`, `peers`, `codec`, `basis`, `mean`, `outer`
    (the outer optimizer), `fp32` (the codec of slow weights), and the arguments `method`, `replicas` and `seed`.

    Raises ConfigError where settings clash, with their names.
    """

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int]],
        method: MethodConfig,
        replicas: int,
        *,
        seed: int = 0,
        layers: int | None = None,
    ):
        check_method(method, replicas)
        self.method, self.replicas, self.seed = method, replicas, seed
        self.peers = choose(Peers, method.peers, "method.peers").of(method, seed)
        self.codec = make_codec(method.codec, method.codec_keep, where="method.codec")
        self._outer = choose(OuterOptimizer, method.outer, "method.outer")
        self.outer = self._outer.of(method)
        self._points = _points(method)
        self.basis = choose(Basis, method.basis, "method.basis")()
        self.mean = choose(Mean, method.mean, "method.mean").of(method)
        if not self.mean.by_coordinate:
            self.codec = in_one_piece(self.codec)
        self.fp32 = make_codec("fp32")
        found = pieces(shapes, method.sliced, method.slices, layers)
        groups = _groups(found, method)
        h, count = method.sync_every_steps, len(groups)
        if count > h:
            raise ConfigError(
                f"method.sync_every_steps = {h} is too short for {count} fragments{_REST.get(method.fragments, '')} to"
                " take turns"
            )
        self.schedule = Schedule(count, h)
        self.fragments = [self._fragment(group, self.schedule.offset(p)) for p, group in enumerate(groups)]
        for p, fragment in enumerate(self.fragments):
            if not fragment.numel:
                names = ", ".join(piece.parameter for piece in fragment.pieces) or "no parameters"
                raise ConfigError(f"fragment {p} has nothing to exchange: it has {names}, of no values")

    def _fragment(self, group: list[Piece], offset: int) -> Fragment:
        ordered = sorted(group, key=lambda piece: -1 if piece.owner is None else piece.owner)
        everyone, sections = range(self.replicas), []
        alone = self.codec.by_parameter
        for (owner, _), some in itertools.groupby(ordered, lambda piece: (piece.owner, piece if alone else None)):
            owners = everyone if owner is None else everyone[owner :: self.method.slices]
            sections.append((sum(piece.numel for piece in some), owners))
        return Fragment(tuple(ordered), tuple(sections), sum(numel for numel, _ in sections), offset)

    # When

    def turns(self, step: int) -> list[int]:
        """Return the numbers of the fragments whose turn is after `step` (steps count from 1)."""
        return self.schedule.turns(step)

    def overlap(self, replica: int) -> int:
        """Return tau of a replica: the number of inner steps between sending a fragment and applying it."""
        return self.method.overlap_steps[replica % len(self.method.overlap_steps)]

    def closes(self, fragment: int, steps: int) -> bool:
        """Tell whether a fragment is exchanged once more at the end of a run of `steps`, besides its turns."""
        return self.method.close_last_round and fragment not in self.turns(steps)

    def turns_in(self, fragment: int, steps: int) -> int:
        """Return the number of turns of a fragment in a run of `steps`, the one that closes the run included."""
        return self.schedule.turns_of(fragment, steps) + self.closes(fragment, steps)

    def all_turns(self, steps: int) -> list[Turn]:
        """Return all turns of a run of `steps`, in the order in which they are sent; the last ones may close it."""
        found, had = [], [0] * len(self.fragments)
        closing = [i for i in range(len(self.fragments)) if self.closes(i, steps)]
        for step in range(1, steps + 1):
            for fragment in self.turns(step) + (closing if step == steps else []):
                found.append(Turn(step, fragment, had[fragment], is_closing=step == steps and fragment in closing))
                had[fragment] += 1
        return found

    def outer_at(self, step: int, steps: int | None) -> OuterOptimizer:
        """Return the outer optimizer with the numbers of a turn after `step` of a run of `steps`.

        Raises ConfigError where these follow points of the run and `steps` is None.
        """
        if not self._points:
            return self.outer
        if steps is None:
            raise ConfigError(f"method.{next(iter(self._points))} needs the steps of the whole run: steps=...")
        now = {key: points.at(step / steps) for key, points in self._points.items()}
        return self._outer.of(_with_points(self.method, now))

    # Among whom

    def group(self, fragment: int, turn: int, replica: int, *, present: Sequence[int] | None = None) -> list[int]:
        """Return the replicas with which `replica` averages at a turn, itself among them, in ascending order.

        `turn`: how many turns the fragment has had before. `present`: the replicas that are there, in ascending order,
        where some may be gone; None: all.
        """
        if present is None:
            return self.peers.members((fragment, turn), self.replicas, replica)
        return self.peers.among((fragment, turn), self.replicas, replica, present)

    @property
    def is_plain(self) -> bool:
        """Tell whether turns with all replicas are ordinary means of fp32 values, in two phases."""
        everyone = self.peers.most(self.replicas) == self.replicas
        plain = self.codec.lossless and self.mean.is_ordinary
        return plain and self.method.trainable != "slice" and everyone

    def sections(self, fragment: int) -> Sequence[Section] | None:
        """Return the sections of a fragment's message, which are encoded one by one; None where it is encoded whole."""
        apart = self.method.trainable == "slice" or self.codec.by_parameter
        return self.fragments[fragment].sections if apart else None

    @property
    def may_leave_subspace(self) -> bool:
        """Tell whether the mean of messages that keep to a subspace may leave it."""
        return not (self.codec.lossless and self.mean.is_ordinary)

    def factor(self, replica: int) -> float:
        """Return the number that a replica multiplies its outer gradients by, which is 1 where it is honest."""
        return 1.0 if replica < self.replicas - self.method.byzantine else self.method.byzantine_factor

    def encoded(self, fragment: int, message: Tensor, seed: int) -> tuple[list[Tensor], Tensor]:
        """Return a replica's message of a fragment as it is sent, by sections, and the values [n] that others read."""
        packed = encoded(message, self.codec, seed, self.sections(fragment))
        return packed, read_back(message, packed, self.codec, self.sections(fragment))

    # In how many bytes

    def purposes(self, turn: int) -> tuple[str, ...]:
        """Return the purposes of what travels for a turn of this number.

        They are `OUTER` and, from the second turn on, `SLOW_WEIGHTS` where the outer optimizer needs them.
        """
        return (OUTER, SLOW_WEIGHTS) if self.outer.needs_peers and turn else (OUTER,)

    def sent_bytes(self, fragment: int, turn: int, replica: int) -> dict[str, int]:
        """Return the bytes that a replica sends for a turn of a fragment, by purpose; turns count from 0."""
        group, this = self.group(fragment, turn, replica), self.fragments[fragment]
        me, size = group.index(replica), len(group)
        found = {OUTER: 0}
        for (numel, owners), count in this.alike.items():
            owned = numel, [i for i, r in enumerate(group) if r in owners]
            found[OUTER] += count * owned_mean_bytes([owned], self.codec, size, me)
        if SLOW_WEIGHTS in self.purposes(turn):
            found[SLOW_WEIGHTS] = owned_mean_bytes([(this.numel, range(size))], self.fp32, size, me)
        return found

    def phases(self, fragment: int) -> dict[str, int]:
        """Return the number of phases (swaps of messages) of a fragment's turn in the largest group, by purpose."""
        met, this = self.peers.most(self.replicas), self.fragments[fragment]
        shared = any(
            encoded_mean_in_shares(n, self.codec, met, len(owners) * met // self.replicas) for n, owners in this.alike
        )
        slow = encoded_mean_in_shares(this.numel, self.fp32, met, met)
        return {OUTER: 1 + (self.is_plain or shared), SLOW_WEIGHTS: 1 + slow}

    def total_bytes(self, steps: int, replica: int) -> dict[str, int]:
        """Return the bytes that a replica sends in a run of `steps`, by purpose."""
        found: dict[str, int] = dict.fromkeys((OUTER, SLOW_WEIGHTS) if self.outer.needs_peers else (OUTER,), 0)
        for fragment in range(len(self.fragments)):
            for turn in range(self.turns_in(fragment, steps)):
                for purpose, nbytes in self.sent_bytes(fragment, turn, replica).items():
                    found[purpose] += nbytes
        return found


#: What the last fragment is of, by the kind of fragments.
_REST = {"slices": " (one is of what is in no slice)", "patterns": " (one may be of what no pattern matches)"}
_REST |= dict.fromkeys(("sequential", "strided"), " (one is of what is in no layer)")


def _groups(found: list[Piece], method: MethodConfig) -> list[list[Piece]]:
    """Return the pieces of each fragment; what belongs to no layer, slice or pattern comes last, if there is any."""
    if method.fragments == "whole":
        return [found]
    if method.fragments == "balanced":
        if method.fragment_count > len(found):
            raise ConfigError(
                f"method.fragment_count = {method.fragment_count} is more than the {len(found)} parts of parameters"
            )
        return [[found[i] for i in group] for group in balanced([p.numel for p in found], method.fragment_count)]
    if method.fragments == "slices":
        keys = {piece: piece.owner for piece in found}
        # A stage of a pipeline may hold none of the layers of a slice, and then has no fragment of it.
        order: Sequence[int] = sorted({piece.owner for piece in found if piece.owner is not None})
    elif method.fragments == "patterns":
        keys, order = {}, range(len(method.fragment_patterns))
        for piece in found:
            matching = (i for i, p in enumerate(method.fragment_patterns) if fnmatch.fnmatchcase(piece.parameter, p))
            keys[piece] = next(matching, None)
    else:
        layers = layer_of({piece.parameter: piece.shape for piece in found})
        if not layers:
            raise ConfigError(
                f"method.fragments = {method.fragments} needs layers in a numbered container (as nn.ModuleList), and no"
                " parameter's name has a number: use fragments = patterns, or whole"
            )
        numbers = sorted(set(layers.values()))
        cut = layer_fragments(len(numbers), method.layers_per_fragment, method.fragments)
        fragment_of = {numbers[i]: p for p, group in enumerate(cut) for i in group}
        keys = {piece: fragment_of.get(layers.get(piece.parameter, -1)) for piece in found}
        order = range(len(cut))
    groups = [[piece for piece in found if keys[piece] == p] for p in order]
    for p, group in enumerate(groups):
        if not group:
            named = method.fragment_patterns[p] if method.fragments == "patterns" else p
            raise ConfigError(f"method.fragments = {method.fragments}: fragment {named!r} holds no parameter")
    rest = [piece for piece in found if keys[piece] is None]
    return [*groups, rest] if rest else groups
