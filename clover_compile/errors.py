"""Every error the compiler half can raise; the base classes are the runner's."""

from __future__ import annotations

from clover_compile.runtime.errors import CloverError, Faults, InputError, RunError

__all__ = [
    "BuildError",
    "CheckpointChanged",
    "CloverError",
    "Faults",
    "InputError",
    "NoModel",
    "NotClover",
    "RunError",
    "VerdictError",
]


class BuildError(CloverError):
    """A build could not be finished although its input was usable."""


class VerdictError(BuildError):
    """The built bundle did not agree with the eager model; no bundle was written."""

    template = "the bundle does not agree with the eager model: {reason}; nothing was written"


class NotClover(InputError):
    """The checkpoint is of another model family; only Clover models can be compiled."""

    template = (
        "config.json: model_type is {found}, not a CloverMoeModelLM of model_type clover_moe; "
        "give a Clover checkpoint"
    )


class NoModel(InputError):
    """The model named on the command line is neither a folder nor one of the bundled models."""

    template = (
        "{model}: no such folder; give a folder holding config.json and model.safetensors, "
        "or a bundled model: {known}"
    )


class CheckpointChanged(BuildError):
    """A weight file changed or became unreadable after its header was checked; start again."""

    template = "{file}: cannot be read any more ({reason}); do not change a checkpoint in use"


class SpecialisedDimension(BuildError):
    """torch.export fixed a dimension that must stay dynamic, or split one declared dimension in
    several. The model code depends on a size in a way the trace cannot follow; report it.
    """

    template = "trace of Unit {unit}: dimension {dimension} should be one symbol but is {found}"


class PassFailed(BuildError):
    """A graph pass did not do what it must. Nothing was written; the message names the pass and the
    passes that had already run.
    """

    template = "pass {name} on Unit {unit}: {reason} (passes already run: {done})"


class UnknownTarget(InputError):
    """The target named on the command line does not exist; `clover-compile targets` lists them."""

    template = "no target is called {name!r}; known targets: {known}"


class OutputExists(InputError):
    """The output is there already; nothing is ever overwritten by accident."""

    template = "{path}: exists; give another -o, or --force to replace the bundle there"


class NotOurFolder(InputError):
    """--force replaces only a bundle: a folder that holds a manifest of ours."""

    template = "{path}: not a bundle (no manifest.json in it); --force does not replace it"


class WrongDtype(InputError):
    """The target cannot hold its weights in that precision."""

    template = "--dtype {dtype} is not for target {target}; it takes: {known}"


class ContextTooLong(InputError):
    """The context must hold more than one block and no more rows than the model was made for."""

    template = "--context {context}: must be above the block size {block} and at most {limit}"


class NonfiniteWeights(InputError):
    """A weight holds NaN or Inf; every answer would be NaN. The checkpoint is damaged or its
    training diverged; get another copy.
    """

    template = "NaN or Inf in the weights: {tensors}; get an undamaged checkpoint"


class OtherModel(InputError):
    """A bundle can be verified only against the checkpoint it was built from."""

    template = "{model}: not the checkpoint this bundle was built from; other hashes: {files}"
