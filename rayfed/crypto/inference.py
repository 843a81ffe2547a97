"""Encrypted inference: a server classifies an image that it cannot see (CKKS, with TenSEAL).

Source: Gilad-Bachrach et al. 2016, "CryptoNets"; Cheon et al. 2017, "Homomorphic Encryption for Arithmetic of
Approximate Numbers" (CKKS, instead of CryptoNets' YASHE). The server has plain weights; only the client sees image and
logits. This protects data in prediction, not in training.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import tenseal as ts
import torch
from torch import Tensor, nn

from rayfed.errors import UserError

_DEGREE, _MODULI, _SCALE = 8192, (31, 26, 26, 26, 26, 26, 26, 31), 2.0**26
"""Parameters of CKKS: 218 bits at degree 8192 give 128-bit security by the homomorphic encryption standard.

The six products of 26 bits are the convolution, the joining of its channels into one vector, two squares and two linear
layers."""

_LAYERS = ["conv1", "square1", "flatten", "fc1", "square2", "fc2"]


@dataclass(frozen=True)
class CryptonetClient:
    """Client that encrypts images and decrypts logits, with the only copy of the secret key."""

    context: ts.Context

    @classmethod
    def with_new_keys(cls) -> CryptonetClient:
        """Create a client with new keys."""
        context = ts.context(ts.SCHEME_TYPE.CKKS, _DEGREE, coeff_mod_bit_sizes=list(_MODULI))
        context.global_scale = _SCALE
        context.generate_galois_keys()
        return cls(context)

    def public(self) -> bytes:
        """Return the serialised keys for the server: all keys except the secret key."""
        data: bytes = self.context.serialize(save_secret_key=False)
        return data

    def encrypt(self, image: Tensor, conv: nn.Conv2d) -> tuple[bytes, int]:
        """Encrypt a grey image (1, H, W) as windows of the server's first layer, and return the number of windows."""
        (height, width), (step, _) = conv.kernel_size, conv.stride
        vector, windows = ts.im2col_encoding(self.context, image[0].tolist(), height, width, step)
        return vector.serialize(), windows

    def decrypt(self, logits: bytes) -> list[float]:
        """Decrypt the logits that the server returned."""
        found: list[float] = ts.ckks_vector_from(self.context, logits).decrypt()
        return found


@dataclass(frozen=True)
class CryptonetServer:
    """Server that evaluates a `cryptonet` on images that it cannot read."""

    context: ts.Context
    model: nn.Sequential

    @classmethod
    def from_public_keys(cls, public: bytes, model: nn.Sequential) -> CryptonetServer:
        """Create the server for one client's public keys and a `cryptonet`.

        Raises `UserError` for any other network, or one that normalises its images.
        """
        if [name for name, _ in model.named_children()] != _LAYERS or model._forward_pre_hooks:
            raise UserError("encrypted inference needs a `cryptonet` without `normalise`")
        return cls(ts.context_from(public), model)

    def classify(self, image: bytes, windows: int) -> bytes:
        """Classify an encrypted image, and return the encrypted logits."""
        layers: dict[str, Any] = dict(self.model.named_children())
        conv, fc1, fc2 = layers["conv1"], layers["fc1"], layers["fc2"]
        vector = ts.ckks_vector_from(self.context, image)
        channels = [
            vector.conv2d_im2col(kernel.tolist(), windows) + bias
            for kernel, bias in zip(conv.weight[:, 0], conv.bias.tolist(), strict=True)
        ]
        values = ts.CKKSVector.pack_vectors(channels)
        values.square_()
        for linear in (fc1, fc2):
            values = values.mm(linear.weight.T.tolist()) + linear.bias.tolist()
            if linear is fc1:
                values.square_()
        answer: bytes = values.serialize()
        return answer


def measure(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, float]:
    """Classify images (N, 1, H, W) under encryption, and return accuracy, agreement, seconds and bytes per image.

    Agreement is the share of images that get the class of the plain network. The names are those of the columns
    `encrypted_*` of the table `rounds`.
    """
    assert isinstance(model, nn.Sequential)
    client = CryptonetClient.with_new_keys()
    server = CryptonetServer.from_public_keys(client.public(), model)
    conv = model.get_submodule("conv1")
    assert isinstance(conv, nn.Conv2d)
    classes, sizes = [], []
    began = perf_counter()
    for image in images:
        sealed, windows = client.encrypt(image, conv)
        answer = server.classify(sealed, windows)
        classes.append(int(np.argmax(client.decrypt(answer))))
        sizes.append(len(sealed) + len(answer))
    seconds = perf_counter() - began
    with torch.no_grad():
        plain = model(images).argmax(1)
    found = torch.tensor(classes)
    return {
        "encrypted_accuracy": float((found == labels).float().mean()),
        "encrypted_agreement": float((found == plain).float().mean()),
        "encrypted_seconds": seconds / len(images),
        "encrypted_bytes": sum(sizes) // len(images),
    }
