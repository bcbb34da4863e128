"""Every error the compiler half can raise; the base classes are the runner's."""

from __future__ import annotations

from clover_compile.runtime.errors import CloverError, Faults, InputError, RunError

__all__ = [
    "BuildError",
    "CannotWrite",
    "CheckpointChanged",
    "CloverError",
    "Faults",
    "InputError",
    "KernelsOverBudget",
    "ModelOverflows",
    "NeedsCheckpoint",
    "NoModel",
    "NoProbes",
    "NotClover",
    "RunError",
    "VerdictError",
]


class BuildError(CloverError):
    """A build could not be finished although its input was usable; nothing was written."""


class VerdictError(BuildError):
    """The bundle did not agree with the eager model, so no bundle was written, or the old verdict
    stays. Right after a build this is a fault of the compiler: report it. When an old bundle is
    verified, the libraries or the machine may be others than it was built with.
    """

    template = (
        "the bundle does not agree with the eager model: {reason}; no verdict was written: "
        "do not use it, and report this with the bundle's versions"
    )


class VerdictKept(BuildError):
    """The proof came to its end, but the new verdict.json cannot be written, for want of rights or
    disk, so the old one stays. Run `verify` where the bundle and the folder around it can be
    written to.
    """

    template = (
        "{path}: the proof ended with: {outcome}; verdict.json stays as it was ({reason}): run "
        "verify again where the bundle and the folder around it can be written to"
    )


class KernelsOverBudget(BuildError):
    """A compiled kernel spills registers, exceeds the shared memory of its GPU or lacks the matrix
    instruction it was written for. The installed Triton may be another than the kernels were
    tuned with: install one that the error names, or report it.
    """

    template = (
        "the kernels for {target} break their budget: {faults}; install the Triton that the "
        "kernels are tested with, or report this"
    )


class NotClover(InputError):
    """The checkpoint is of another model family; only Clover models can be compiled. Give the
    folder of a Clover checkpoint.
    """

    template = (
        "config.json: model_type is {found}, not a CloverMoeModelLM of model_type clover_moe; "
        "give a Clover checkpoint"
    )


class NoModel(InputError):
    """The model named on the command line is neither a folder nor one of the bundled models.
    Nothing is downloaded: fetch the checkpoint first and name its folder.
    """

    template = (
        "{model}: {found}{meant}; give a folder holding config.json and model.safetensors, "
        "or a bundled model: {known}"
    )


class CheckpointChanged(BuildError):
    """A weight file changed or became unreadable after its header was checked; start again."""

    template = "{file}: cannot be read any more ({reason}); do not change a checkpoint in use"


class SpecialisedDimension(BuildError):
    """torch.export fixed a dimension that must stay dynamic, or split one declared dimension in
    several. The model code depends on a size in a way the trace cannot follow; report it.
    """

    template = (
        "trace of Unit {unit}: dimension {dimension} should be one symbol but is {found}; "
        "report this with the checkpoint's config.json"
    )


class MissingExtra(InputError):
    """The target needs a package that is not installed; the message holds the line that installs
    it.
    """

    template = "{package} is not installed; run: pip install 'clover-compile[{extra}]'"


class NoCompiler(InputError):
    """The TensorRT targets compile their plugin when it is first needed. That takes a C++ compiler
    and two sets of headers, which packages of the extra `trt` hold; one of these is missing.
    """

    template = "the TensorRT plugin cannot be compiled: no {missing}; install it ({remedy})"


class PluginFailed(BuildError):
    """The C++ compiler did not take the plugin; the message holds its first error. The compiler may
    be older than C++17, or the headers another version than the plugin was written for: report it.
    """

    template = "{compiler} did not compile the TensorRT plugin: {reason}; report this"


class EngineBuildFailed(BuildError):
    """TensorRT-RTX did not take the network, or died over it; the message holds its own words. The
    installed version may be another than the one this was tested with: report it.
    """

    template = "no TensorRT-RTX engine: {reason}; report this with the version of tensorrt-rtx"


class PassFailed(BuildError):
    """A graph pass did not do what it must. Nothing was written; the message names the pass and the
    passes that had already run. `--dump-passes DIR` keeps the graph after each of them.
    """

    template = (
        "pass {name} on Unit {unit}: {reason} (passes already run: {done}); "
        "report this, with what --dump-passes writes"
    )


class UnknownTarget(InputError):
    """The target named on the command line does not exist; `clover-compile targets` lists them."""

    template = "no target is called {name}{meant}; give one of: {known}"


class OutputExists(InputError):
    """The output is there already, and nothing is ever overwritten by accident. Choose another
    name, or let --force replace a bundle.
    """

    template = "{path}: exists; give another -o, or --force to replace the bundle there"


class CannotWrite(InputError):
    """The folder of an output cannot be written to, found before anything else is done. Choose a
    place where you may create folders, outside of bundles, with a name that is text.
    """

    template = "{path}: cannot be written ({reason}); give a place you may write to"


class NotOurFolder(InputError):
    """--force replaces only a bundle, which is a folder that holds a manifest of ours. Remove what
    is there yourself, or choose another name.
    """

    template = (
        "{path}: not a bundle (no manifest.json in it); --force does not replace it: "
        "give another -o or remove it"
    )


class WrongDtype(InputError):
    """The target cannot hold its weights in that precision; choose one that the message names."""

    template = "--dtype {dtype} is not for target {target}; give one it takes: {known}"


class ContextTooLong(InputError):
    """The context must hold more than one block and no more rows than the model was made for. Leave
    --context out for the model's own limit.
    """

    template = "--context {context}: give one above the block size {block} and at most {limit}"


class NonfiniteWeights(InputError):
    """A weight holds NaN or Inf; every answer would be NaN. The checkpoint is damaged or its
    training diverged; get another copy.
    """

    template = "NaN or Inf in the weights: {tensors}; get an undamaged checkpoint"


class ModelOverflows(InputError):
    """Every weight is finite, and yet the eager model itself comes to NaN or Inf on the probes: a
    layer leaves the range of its numbers. The message names the first part that does. Get a
    checkpoint whose training did not diverge, or build in another dtype where the target has one.
    """

    template = (
        "{model}: the eager model leaves the range of {dtype}, {finding}; "
        "get a checkpoint that was trained to the end"
    )


class NeedsCheckpoint(InputError):
    """`verify --locate` and `profile --against eager` run the eager model, and a bundle holds none.
    The bundled checkpoints are tried; this bundle was built from another one, so name its folder.
    """

    template = "{path}: this runs the eager model of {name}, which is not bundled; give --model"


class NoProbes(InputError):
    """The bundle was built where its eager model did not fit, so it holds nothing to compare with.
    Name the checkpoint on a machine that has the memory (`build --plan` says how much): the eager
    model is then run afresh.
    """

    template = "{path}: holds no probes; name its checkpoint: verify {path} --model MODEL"


class OtherModel(InputError):
    """A bundle can be verified only against the checkpoint it was built from, file by file. Give
    that checkpoint, or leave --model out and compare with the bundle's own probes.
    """

    template = (
        "{model}: not the checkpoint this bundle was built from (other hashes: {files}); "
        "give that one, or leave --model out"
    )


class NeedsThisModel(InputError):
    """Speeds are compared between bundles of one model: the same sizes and the same settings. Give
    a bundle that was built from the same checkpoint, for another target or in another dtype.
    """

    template = (
        "{path}: of another model than the bundle that is profiled; give --against one of the same"
    )


class CannotModel(InputError):
    """The bundle can neither run on this machine nor be modelled from what it holds: only Triton
    bundles, and those of TensorRT that are not finished, say what they launch and move. Profile it
    where it runs.
    """

    template = "{path}: cannot be profiled here ({reason}); profile it where it can run"


class BadMessages(InputError):
    """The messages to profile with cannot be read. Each line of the file is a JSON object with a
    `prompt`, a text or a list of messages with role and content, and perhaps the `answer` expected.
    """

    template = (
        '--messages {path}: {reason}; give a file of lines such as {{"prompt": "Hello", '
        '"answer": "Hi"}}'
    )
