"""Encrypted inference gives what the plain network gives, and the server has no key to look with."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from rayfed.crypto.inference import CryptonetClient, CryptonetServer
from rayfed.errors import UserError
from rayfed.models.build import build_model
from rayfed.registry import build


@pytest.fixture(scope="module")
def client() -> CryptonetClient:
    return CryptonetClient.with_new_keys()


@pytest.fixture(scope="module")
def model() -> nn.Sequential:
    net = build_model("cryptonet", {}, (1, 16, 16), 10, seed=0)
    assert isinstance(net, nn.Sequential)
    return net


@pytest.mark.engine
def test_the_logits_are_those_of_the_plain_network(client: CryptonetClient, model: nn.Sequential) -> None:
    data = build("datasets", "digits", {"size": 16}).load()
    server = CryptonetServer.from_public_keys(client.public(), model)
    for image in torch.from_numpy(data.test_images[:3]).float() / 255:
        sealed, windows = client.encrypt(image, model.conv1)  # type: ignore[arg-type]
        logits = client.decrypt(server.classify(sealed, windows))
        with torch.no_grad():
            np.testing.assert_allclose(logits, model(image[None])[0], atol=1e-2)


@pytest.mark.engine
def test_the_server_cannot_decrypt(client: CryptonetClient, model: nn.Sequential) -> None:
    server = CryptonetServer.from_public_keys(client.public(), model)
    assert not server.context.has_secret_key()
    sealed, windows = client.encrypt(torch.zeros(1, 16, 16), model.conv1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="secret"):
        CryptonetClient(server.context).decrypt(server.classify(sealed, windows))


@pytest.mark.engine
def test_a_network_that_normalises_is_refused(client: CryptonetClient) -> None:
    net = build_model("cryptonet", {}, (1, 16, 16), 10, seed=0, normalise=([0.5], [0.5]))
    with pytest.raises(UserError, match="without `normalise`"):
        CryptonetServer.from_public_keys(client.public(), net)  # type: ignore[arg-type]


def test_other_images_are_refused() -> None:
    with pytest.raises(UserError, match="grey images"):
        build_model("cryptonet", {}, (3, 32, 32), 10, seed=0)
