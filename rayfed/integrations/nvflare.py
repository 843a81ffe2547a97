"""NVIDIA FLARE: a client filter that records updates for `rayfed replay`.

Uses the filters of nvflare 2.9. They see the state sent to a client and its update, but not the training. Therefore the
user states the local steps, and samples are not recorded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from rayfed.core.arrays import is_counter
from rayfed.core.recording_checks import Normalisation
from rayfed.errors import UserError, require_extra
from rayfed.recording import Recorder
from rayfed.update import LocalTraining

if TYPE_CHECKING:
    from nvflare.apis.fl_context import FLContext
    from nvflare.apis.shareable import Shareable

try:
    from nvflare.apis.filter import Filter
except ImportError:  # the constructor raises the error
    Filter = object

_SENT = "rayfed.sent"
_MOST = 1 << 31


class RecordingFilter(Filter):  # type: ignore[misc]  # nvflare comes without types
    """Filter that records the model state sent to a client and the client's update.

    Put it first among the task data filters and last among the task result filters, so that it records the update after
    all other filters.
    """

    def __init__(
        self,
        folder: str,
        model: str,
        samples: int,
        shape: Sequence[int],
        local: Mapping[str, Any],
        normalise: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        """Create a filter from numbers, strings and mappings of these, as in the configuration of a job.

        `model` is the class of the trained model, such as `my_module:Net`, without constructor arguments. A client
        trains on `samples` images of `shape` (C, H, W). `local` has the fields of `LocalTraining`, such as
        `{"steps": 19, "lr": 0.01}`, and `normalise` the `mean` and `std` (per channel) that normalise images in [0, 1].
        """
        require_extra("nvflare", "RecordingFilter", "nvflare.apis.filter")
        super().__init__()
        self.folder, self.model, self.samples, self.shape = folder, model, samples, list(shape)
        self.local, self.normalise = dict(local), normalise

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Store the received model state, or record the update; return the data unchanged."""
        from nvflare.apis.dxo import DataKind, from_shareable
        from nvflare.apis.fl_constant import FilterKey, FLContextKey, ReturnCode
        from nvflare.app_common.app_constant import AppConstants

        if shareable.get_return_code() != ReturnCode.OK:
            return shareable
        if fl_ctx.get_prop(FLContextKey.FILTER_DIRECTION) == FilterKey.IN:
            number = shareable.get_header(AppConstants.CURRENT_ROUND)
            fl_ctx.set_prop(_SENT, (number, self._state(shareable)), private=True, sticky=False)
            return shareable
        number, sent = fl_ctx.get_prop(_SENT) or (None, None)
        if sent is None:
            raise UserError(
                "RecordingFilter: no model state was received; add the filter to the task data filters of the same task"
            )
        returned = self._state(shareable)
        if from_shareable(shareable).data_kind == DataKind.WEIGHT_DIFF:
            returned = _moved(sent, returned)
        normalise = None if self.normalise is None else Normalisation(**self.normalise)
        local = LocalTraining(**self.local)
        recorder = Recorder(self._model(), self.folder, local, normalise=normalise, shape=self.shape)
        recorder.round(sent, returned, self.samples, round=number, client=_number(fl_ctx.get_identity_name()))
        return shareable

    def _model(self) -> Any:
        module, _, name = self.model.partition(":")
        return getattr(import_module(module), name)()

    def _state(self, shareable: Shareable) -> dict[str, Tensor]:
        """Return the exchanged weights or weight differences; raises `UserError` without them."""
        from nvflare.apis.dxo import DataKind, from_shareable

        dxo = from_shareable(shareable)
        if dxo.data_kind not in (DataKind.WEIGHTS, DataKind.WEIGHT_DIFF) or not isinstance(dxo.data, Mapping):
            raise UserError(f"RecordingFilter: found data of kind {dxo.data_kind}; send weights or weight differences")
        return {name: _tensor(value) for name, value in dxo.data.items()}


def _tensor(value: Any) -> Tensor:
    return value.detach().clone() if isinstance(value, Tensor) else torch.from_numpy(np.array(value))


def _moved(sent: Mapping[str, Tensor], differences: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state after weight differences. Raises `UserError` if a shape differs from that of the sent state."""
    for name, difference in differences.items():
        shape = tuple(sent[name].shape) if name in sent else "no tensor"
        if shape != tuple(difference.shape) and not is_counter(name):
            raise UserError(
                f"RecordingFilter: the difference of '{name}' has shape {tuple(difference.shape)}; sent: {shape}"
            )
    return {
        name: difference if is_counter(name) else sent[name] + difference for name, difference in differences.items()
    }


def _number(name: str) -> int:
    """Return the number of a site: 1 for `site-1`, or a number computed from any other name."""
    found = re.fullmatch(r"site-([1-9]\d{0,5})", name)
    return int(found[1]) if found else 1_000_000 + crc32(name.encode()) % _MOST
