"""Before a job that stores other layers begins: does the engine give them, and can the stored type hold them?

The engine's own probe texts are run as the job would run them. A residual stream may be far larger than a state after
the final norm (104,000 in a Gemma 3 of 270 million weights), and larger at every row's first token than float16 goes:
then a job would compute every row and store none.
"""

import numpy as np

from extract.engine.contract import Runtime, layer_states
from extract.errors import SpecError
from extract.records import TokenBatch
from extract.shards.values import Fault, as_float32, value_type
from extract.spec import StatesSpec


class LayersOverflow(SpecError):
    """Every row would end without states, because the stored type cannot hold a layer's."""

    template = (
        "states.layers: the states after layer {layer} reach {found:,.0f} in each of the engine's probe texts, more "
        "than {dtype} holds ({largest:,.0f}), so rows would end without states. Choose --dtype bfloat16 or float32."
    )


def try_layers(runtime: Runtime, states: StatesSpec) -> None:
    """Run the probe texts, if the job stores other layers than the final one.

    Raises:
        LayersOverflow: there is a layer that the stored type can hold in none of them.
        NoLayerStates: the engine gives none.
    """
    sequences = runtime.contract.probe.sequences
    if not states.layers or not sequences:
        return
    stored = value_type(states.dtype)
    largest = np.zeros((len(sequences), len(states.layers)))
    overflows = np.zeros(largest.shape, bool)
    for number, sequence in enumerate(sequences):
        ids = np.array(sequence.input_ids, np.int32)
        bounds = np.array([0, len(ids)], np.int32)
        batch = TokenBatch(input_ids=ids, cu_seqlens=bounds, members=np.zeros(1, np.int64))
        for column, found in enumerate(layer_states(runtime, batch, states.kind, states.layers)[1:]):
            largest[number, column] = np.abs(as_float32(found)).max()
            overflows[number, column] = (stored.encode(found).faults == Fault.OVERFLOW).any()
    for place in np.flatnonzero(overflows.all(axis=0)):
        raise LayersOverflow(
            layer=states.layers[place], found=largest[:, place].min(), dtype=states.dtype, largest=stored.largest
        )
