"""Measure how much federated learning leaks: attacks, defences, aggregation rules and the engine that runs them.

This package is plain PyTorch and works without Ray. The package `actors` adds Ray.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from os import PathLike, fspath, getcwd
from typing import TYPE_CHECKING, Any

from rayfed.core.user_exits import exits_refused
from rayfed.version import __version__

if TYPE_CHECKING:
    from torch import nn

    from rayfed.aggregation.base import Aggregation
    from rayfed.attacks.base import Attack, Reconstruction
    from rayfed.audits.options import AuditOptions
    from rayfed.core.recording_checks import Normalisation
    from rayfed.data.section import UserData
    from rayfed.defences.base import Defence, Task
    from rayfed.metrics.base import Metric
    from rayfed.recording import Recorder
    from rayfed.registry import component
    from rayfed.results.loading import Run, Sweep
    from rayfed.runs.api_args import Source
    from rayfed.simulation.client.defending import Defended
    from rayfed.threat_model.grants.base import Grant
    from rayfed.update import LocalTraining, Observation, Update

_CLASSES = {
    "Aggregation": "rayfed.aggregation.base",
    "Attack": "rayfed.attacks.base",
    "AuditOptions": "rayfed.audits.options",
    "Defence": "rayfed.defences.base",
    "Grant": "rayfed.threat_model.grants.base",
    "LocalTraining": "rayfed.update",
    "Metric": "rayfed.metrics.base",
    "Normalisation": "rayfed.core.recording_checks",
    "Observation": "rayfed.update",
    "Reconstruction": "rayfed.attacks.base",
    "Task": "rayfed.defences.base",
    "Update": "rayfed.update",
    "UserData": "rayfed.data.section",
    "component": "rayfed.registry",
}
"""Modules of the classes of the public API, which are imported on first use."""
__all__ = [
    "Aggregation",
    "Attack",
    "AuditOptions",
    "Defence",
    "Grant",
    "LocalTraining",
    "Metric",
    "Normalisation",
    "Observation",
    "Reconstruction",
    "Task",
    "Update",
    "UserData",
    "__version__",
    "attack",
    "audit",
    "component",
    "defend",
    "launch",
    "load",
    "record",
    "sweep",
]
# Functions import what they need, so that `import rayfed` stays fast.


def __getattr__(name: str) -> Any:
    if name not in _CLASSES:
        raise AttributeError(f"module 'rayfed' has no attribute '{name}'")
    return getattr(import_module(_CLASSES[name]), name)


def __dir__() -> list[str]:
    return __all__


def load(path: str | PathLike[str]) -> Run | Sweep:
    """Open the results of a finished or unfinished run or sweep, at a local path or fsspec URL.

    Raises `rayfed.errors.RunError` if the path has neither.

    >>> import tempfile
    >>> import rayfed
    >>> tiny = {
    ...     "name": "tiny",
    ...     "data": {"name": "digits", "size": 8, "train_samples": 40, "test_samples": 10},
    ...     "model": "mlp",
    ...     "federation": {"rounds": 1, "clients": 2},
    ... }
    >>> folder = rayfed.launch(tiny, out=tempfile.mkdtemp()).folder.url
    >>> run = rayfed.load(folder)
    >>> run.status["state"], run.rounds["clients"].to_pylist()
    ('finished', [2])
    """
    from rayfed.results import loading

    return loading.open_results(fspath(path))


@exits_refused()
def record(
    model: nn.Module,
    folder: str | PathLike[str],
    local: LocalTraining | None = None,
    *,
    truth: bool = False,
    normalise: Any = None,
    classes: int | None = None,
    shape: Sequence[int] | None = None,
    loss: str | Mapping[str, Any] | None = None,
) -> Recorder:
    """Record a federation's updates, as its server sees them, into a folder for `rayfed replay`.

    Call the recorder's `round` once per client and round. The arguments describe the federation:

    - `local`: the local steps of clients that return a state. Leave it out if they return gradients.
    - `truth`: also write the samples, so that reconstructions can be scored. Default: False.
    - `normalise`: the `Normalisation` of images in [0, 1], or the `torchvision.transforms.Normalize` of your transform.
    - `classes`: the number of classes. Default: found by a forward pass.
    - `shape`: the shape (C, H, W) of an image. Required on a server, which gives the number of samples but no batch.
    - `loss`: a name, or a mapping with a `name`, as in a scenario. Default: cross entropy of classes.

    Labels of the truth are class indices (N,), or numbers (N, outputs) for `binary_cross_entropy` and
    `mean_squared_error`.

    >>> import tempfile
    >>> from pathlib import Path
    >>> import rayfed, torch
    >>> from rayfed.update import LocalTraining
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    >>> images, labels = torch.rand(4, 1, 8, 8), torch.tensor([3, 1, 4, 1])
    >>> sent = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    >>> torch.nn.functional.cross_entropy(model(images), labels).backward()
    >>> for weight in model.parameters():
    ...     weight.data -= 0.1 * weight.grad
    >>> folder = Path(tempfile.mkdtemp())
    >>> with rayfed.record(model, folder, LocalTraining(steps=1, lr=0.1)) as recorder:
    ...     recorder.round(sent, model.state_dict(), (images, labels))
    >>> from rayfed.recording import Recording
    >>> Recording(folder).rounds
    [0]
    """
    from rayfed import recording

    return recording.Recorder(
        model, folder, local, truth=truth, normalise=normalise, classes=classes, shape=shape, loss=loss
    )


@exits_refused()
def defend(
    defences: Sequence[str | Mapping[str, Any]],
    model: nn.Module,
    *,
    rounds: int,
    samples: int | None = None,
    batch_size: int | None = None,
    steps: int | None = None,
    poisson: bool = False,
    seed: int | None = None,
) -> Defended:
    """Apply defences in your own training loop, to each step's gradient and to the client's update.

    `rounds` is the maximum number of rounds that the client takes part in. A defence of gradients also needs the number
    of the client's `samples`, the `batch_size` of a step and the `steps` of a round. Batches are slices of a new
    permutation in each epoch; with `poisson`, each sample joins a batch independently. The privacy account holds for
    these numbers: print the result to read it. With a `seed` the noise is reproducible: use this to measure, not to
    protect data.

    Raises `rayfed.errors.UserError` for defences that do not work in a user's loop, and later for more rounds or steps
    than declared.

    >>> import rayfed, torch
    >>> model = torch.nn.Linear(2, 2)
    >>> guard = rayfed.defend([{"name": "gaussian", "clip": 1.0, "sigma": 8.0}], model, rounds=10)
    >>> print(guard.account[0])  # doctest: +ELLIPSIS
    gaussian: epsilon 3.35 at delta 1e-05 after 10 rounds, protects each single client (replace-one ...
    >>> sent = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    >>> returned = guard.answer(sent, model.state_dict())  # after the client's training
    """
    from rayfed.simulation.client.defending import Defended, Loop

    return Defended(defences, model, Loop(rounds, samples, batch_size, steps, poisson), seed)


@exits_refused()
def launch(
    scenario: Source,
    *changes: str,
    out: str | PathLike[str] | None = None,
    executor: str = "local",
    address: str | None = None,
    show: bool = False,
) -> Run:
    """Run a scenario, as `rayfed launch` does, and return the run with the results.

    - `scenario`: a YAML file, the name of a scenario that comes with rayfed, a mapping or a loaded `Scenario`.
    - `changes`: strings `PATH=VALUE`, as for `--set`.
    - `out`: the folder that gets the new run folder. Default: the scenario's `output.folder`.
    - `executor`: "local" (this process) or "ray". Both give the same results.
    - `address`: the address of a Ray cluster. Default: start Ray on this machine.
    - `show`: print what the command prints. Default: False.

    Raises `rayfed.errors.UserError`, for example `ScenarioError`, `DataError` or `RunError`, for mistakes of the user.

    >>> import tempfile
    >>> import rayfed
    >>> tiny = {
    ...     "name": "tiny",
    ...     "data": {"name": "digits", "size": 8, "train_samples": 40, "test_samples": 10},
    ...     "model": {"name": "mlp", "hidden": [8]},
    ...     "federation": {"rounds": 1, "clients": 2},
    ...     "attacks": [{"name": "analytic", "observes": "gradient", "batch_size": 1}],
    ... }
    >>> run = rayfed.launch(tiny, "seed=1", out=tempfile.mkdtemp())
    >>> [verdict.state for verdict in run.verdicts()]
    ['leaks']
    >>> run.attacks.column("status").to_pylist()
    ['ok']
    """
    from rayfed.errors import ScenarioError
    from rayfed.results.loading import Run
    from rayfed.runs import runner
    from rayfed.runs.api_args import open_view, read_source
    from rayfed.runs.executors import execution

    loaded = read_source(scenario, changes)
    if loaded.sweep is not None:
        raise ScenarioError(f"{loaded.name} has a `sweep`: call rayfed.sweep")
    with open_view(show) as progress:
        folder = runner.launch(loaded, _text(out), execution(executor, address), progress)
        progress.finished(f"{folder.url}/report.html")
    return Run(folder)


@exits_refused()
def sweep(
    scenario: Source,
    *changes: str,
    out: str | PathLike[str] | None = None,
    executor: str = "local",
    address: str | None = None,
) -> Sweep:
    """Run every trial of a scenario's `sweep`, as `rayfed sweep` does, and return the sweep with the results.

    See `launch` for the arguments.
    """
    import warnings

    from rayfed.errors import ScenarioError
    from rayfed.report.html.sweep import try_sweep_report
    from rayfed.results.loading import Sweep
    from rayfed.runs import sweeps
    from rayfed.runs.api_args import read_source
    from rayfed.runs.executors import sweep_execution
    from rayfed.simulation.progress import SweepProgress

    loaded = read_source(scenario, changes)
    if loaded.sweep is None:
        raise ScenarioError(f"{loaded.name} has no `sweep`: call rayfed.launch")
    folder = sweeps.sweep(loaded, _text(out), sweep_execution(executor, address), SweepProgress())
    try_sweep_report(folder, warnings.warn)
    return Sweep(folder.files)


@exits_refused()
def attack(
    scenario: Source,
    *changes: str,
    run: str | PathLike[str] | Run | None = None,
    arm: str | None = None,
    out: str | PathLike[str] | None = None,
    executor: str = "local",
    address: str | None = None,
    show: bool = False,
) -> Run:
    """Run a scenario's attacks without training, as `rayfed attack` does, and return the run with the results.

    The attacked model has its initial weights. With a `run`, each arm has the weights that it trained in that run; with
    an `arm` too, all arms have the weights of that arm. See `launch` for the other arguments.

    >>> import tempfile
    >>> import rayfed
    >>> run = rayfed.attack(
    ...     "noniid", "data.size=8", "model=mlp", "attacks=[{name: analytic, observes: gradient, victims: 2}]",
    ...     out=tempfile.mkdtemp(),
    ... )
    >>> run.status["kind"]
    'attack'
    """
    from rayfed.errors import ScenarioError, UserError
    from rayfed.results.loading import Run
    from rayfed.runs import runner
    from rayfed.runs.api_args import get_address, open_view, read_source
    from rayfed.runs.executors import execution
    from rayfed.runs.scenario_loading import search_where

    if arm is not None and run is None:
        raise UserError("found `arm` without `run`: give the run that contains the arm")
    source = get_address(run)
    if source is not None:
        search_where(source)
    loaded = read_source(scenario, changes)
    if not loaded.attacks:
        raise ScenarioError(f"{loaded.name} has no `attacks`: add one, such as `attacks: [idlg]`")
    with open_view(show) as progress:
        folder = runner.attack(loaded, source, _text(out), execution(executor, address), progress, arm)
        progress.finished(f"{folder.url}/report.html")
    return Run(folder)


@exits_refused()
def audit(
    model: str | type[nn.Module] | nn.Module | Mapping[str, Any] | None = None,
    data: str | PathLike[str] | tuple[Any, Any] | UserData | None = None,
    *changes: str,
    minutes: float = 10,
    defences: Sequence[Any] | None = None,
    run: str | PathLike[str] | Run | None = None,
    out: str | PathLike[str] | None = None,
    show: bool = False,
    options: AuditOptions | None = None,
) -> list[Run]:
    """Measure how much of the training data a model's gradient leaks, as `rayfed audit` does.

    Return one run on the initial weights. With a `run`, a second one on that run's trained weights follows. The list is
    empty if no attack takes such samples; this does not show that the gradient is safe.

    - `model`: a name, as for the command, a class that can be called without arguments, or an instance of one, with
      the weights to attack. Default: the run's.
    - `data`: a path or name, as for the command, a pair (inputs, labels) of tensors, or a `UserData`, which names a
      table's columns. Default: the run's.
    - `changes`: strings `PATH=VALUE`, as for `--set`.
    - `minutes`: the time limit. Searches get longer until it is reached.
    - `defences`: names, mappings with a `name`, or lists of these, one arm each. Default: nine common defences.
    - `out`: the folder that gets the new run folders. Default: runs.
    - `show`: print the command's output. Default: False.
    - `options`: the `AuditOptions`, such as batch sizes, loss, seed and executor.

    >>> import tempfile
    >>> import rayfed, torch
    >>> images, labels = torch.rand(20, 1, 8, 8), torch.arange(20) % 10
    >>> [run] = rayfed.audit(
    ...     "mlp", (images, labels), "model.hidden=[8]", defences=[{"name": "gaussian", "sigma": 1.0}],
    ...     options=rayfed.AuditOptions(batches=[1], images=1, iterations=1), out=tempfile.mkdtemp(),
    ... )
    >>> {verdict.arm: verdict.state for verdict in run.verdicts()}
    {'none': 'leaks', 'gaussian (sigma 1.0)': 'not reconstructed'}
    """
    from functools import partial
    from time import monotonic

    from rayfed import registry
    from rayfed.audits.options import AuditOptions, Trained, parse_pipelines
    from rayfed.audits.run import AuditBudget, run_audit
    from rayfed.results.loading import Run
    from rayfed.runs.api_args import get_address, open_view
    from rayfed.runs.executors import execution
    from rayfed.simulation.rounds.attacks import Deadline

    registry.search(getcwd())
    options = options or AuditOptions()
    source = get_address(run)
    trained = None if source is None else Trained.from_run(source)
    plan = options.plan(model, data, None if defences is None else parse_pipelines(defences), trained)
    audited = run_audit(
        plan,
        AuditBudget(Deadline(monotonic() + 60 * minutes), options.iterations),
        execution(options.executor, options.address),
        partial(open_view, show, brief=True),
        trained=trained,
        changes=changes,
        out=_text(out),
        shrink=options.batches is None,
    )
    return [Run(one.folder) for one in audited]


def _text(path: str | PathLike[str] | None) -> str | None:
    return None if path is None else fspath(path)
