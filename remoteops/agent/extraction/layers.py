"""Layer ids, in one convention: the number of completed decoder layers.

Id ``k`` names the residual stream after ``k`` decoder layers, that is the input of layer ``k`` (counting from 0):
0 is the embedding's output, ``N`` (the number of layers) is the output of the last layer *before* the final norm.
vLLM (its aux hidden states) and EAGLE count this way. The generator of speculators <= 0.4 counts the layer whose output
it takes, so its id ``j`` is our ``j + 1`` and it can name no embedding. Standard library only: preflight uses it too.
"""

from __future__ import annotations

from typing import Any, List, Sequence, Union

from remoteops.agent.protocol import AgentError

CONVENTION = "completed-layers"
# convention -> what is added to a completed-layers id to get the id of that convention
OFFSETS = {CONVENTION: 0, "layer-output": -1}
ENGINE_CONVENTION = {"connector": CONVENTION, "generator": CONVENTION, "generator-stock": "layer-output"}
TRAINER_SLOTS = 4  # three auxiliary states and the verifier's last one: what an EAGLE-3 trainer's fc expects


def default(num_layers: int) -> List[int]:
    """[2, N//2, N-3, N], the ids that vLLM feeds a draft by default plus the last state.

    On small models these collide (N=6 gives 2, 3, 3, 6) or leave the range. They are then moved to the nearest free ids
    between 1 and N-1, keeping their order. Raises AgentError(UsageError) below four layers: three different auxiliary
    ids do not exist.
    """
    wanted = [2, num_layers // 2, num_layers - 3]
    if len(set(wanted)) == 3 and wanted == sorted(wanted) and wanted[0] >= 1:
        return [*wanted, num_layers]
    if num_layers < 4:
        raise AgentError(
            "UsageError",
            "a model of %d layers has no three different inner layers" % num_layers,
            tried="the default layer ids [2, N//2, N-3, N]",
            hint="name the ids yourself: --layers 0,1,%d" % num_layers,
        )
    # Spread over 1..N-1 as evenly as integers allow: first, middle, last third.
    chosen: List[int] = []
    for target in sorted(min(max(1, one), num_layers - 1) for one in wanted):
        free = [one for one in range(1, num_layers) if one not in chosen]
        chosen.append(min(free, key=lambda one: (abs(one - target), one)))
    return [*sorted(chosen), num_layers]


def resolve(layers: Union[str, Sequence[Any], None], num_layers: int) -> List[int]:
    """The ids of a request as an ascending list of ints.

    ``layers``: "default", None, a list of ints, or a text such as "2,30,58,61". Raises AgentError(UsageError) for an
    id out of 0..N, one named twice, or a list that is not ascending (engines write slots in ascending order whatever
    was asked, so another order would mislabel them).
    """
    if layers is None or layers == "default" or layers == ["default"]:
        return default(num_layers)
    if isinstance(layers, str):
        layers = [one for one in layers.replace(",", " ").split() if one]
    try:
        ids = [int(str(one)) for one in layers]
    except ValueError:
        raise AgentError(
            "UsageError",
            "layer ids are whole numbers, not %r" % (list(layers),),
            hint="for example --layers 2,%d,%d,%d" % (num_layers // 2, num_layers - 3, num_layers),
        ) from None
    if not ids:
        raise AgentError("UsageError", "no layer ids", hint="--layers default, or a list")
    outside = [one for one in ids if not 0 <= one <= num_layers]
    if outside:
        raise AgentError(
            "UsageError",
            "layer ids %s are outside 0..%d" % (outside, num_layers),
            tried="layers %s" % ids,
            hint="ids count completed layers: 0 is the embedding, %d the last state before the final norm" % num_layers,
        )
    if len(set(ids)) != len(ids):
        raise AgentError("UsageError", "layer ids are named twice: %s" % ids, hint="each id once")
    if ids != sorted(ids):
        raise AgentError(
            "UsageError",
            "layer ids must ascend: %s" % ids,
            hint="use %s" % sorted(ids),
            tried="slots are always written in ascending order",
        )
    return ids


def translate(ids: Sequence[int], engine: str) -> List[int]:
    """Completed-layers ids as ``engine`` counts them.

    Raises AgentError(UsageError) for an id that the engine cannot name (the embedding, for the library's own
    generator).
    """
    offset = OFFSETS[ENGINE_CONVENTION[engine]]
    moved = [one + offset for one in ids]
    if any(one < 0 for one in moved):
        raise AgentError(
            "UsageError",
            "the %s engine cannot capture id 0 (the embedding's output)" % engine,
            tried="layers %s" % list(ids),
            hint="leave 0 out, or use another engine",
        )
    return moved


def concerns(ids: Sequence[int], num_layers: int) -> List[str]:
    """What a trainer would trip over although the ids are valid; empty when nothing."""
    found = []
    if num_layers not in ids:
        found.append(
            "id %d (the last state) is not among them: trainers take the last slot as the verifier's final state"
            % num_layers
        )
    if len(ids) != TRAINER_SLOTS:
        found.append(
            "%d ids: EAGLE-3 trainers expect %d (three auxiliary states and the last)" % (len(ids), TRAINER_SLOTS)
        )
    return found
