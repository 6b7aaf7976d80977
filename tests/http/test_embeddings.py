"""`POST /v1/embeddings`, also with OpenAI's own client."""

from __future__ import annotations

import base64

import numpy as np
import pytest
from http_calls import Caller

from cluster import EncoderPool
from cluster.gateway.threaded import GatewayThread

MODEL = "tiny-minicpmv-2.6"


def uri(picture: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(picture).decode()}"


def mean(pool: EncoderPool, picture: bytes) -> np.ndarray:
    return pool.encode(picture).tokens.mean(dim=0).numpy()


def test_openais_client_gets_unit_vectors_in_order(
    gateway: GatewayThread, pool: EncoderPool, pictures: list[bytes]
) -> None:
    openai = pytest.importorskip("openai", reason="OpenAI's client is not installed")
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        for encoding in ("float", "base64", openai.NOT_GIVEN):
            answer = client.embeddings.create(
                model=MODEL, input=[uri(picture) for picture in pictures[:3]], encoding_format=encoding
            )
            assert [entry.index for entry in answer.data] == [0, 1, 2]
            for entry, picture in zip(answer.data, pictures, strict=False):
                found, vector = entry.embedding, mean(pool, picture)
                if encoding == "base64":  # asked for, so left as it came
                    found = np.frombuffer(base64.b64decode(found), "<f4")
                np.testing.assert_allclose(found, vector / np.linalg.norm(vector), rtol=1e-4, atol=1e-5)
        assert answer.usage.prompt_tokens == sum(pool.encode(picture).shape.num_tokens for picture in pictures[:3])
        raw = client.embeddings.create(model=MODEL, input=uri(pictures[0]), extra_body={"normalize": False})
        np.testing.assert_allclose(raw.data[0].embedding, mean(pool, pictures[0]), rtol=1e-4, atol=1e-5)
        with pytest.raises(openai.NotFoundError, match=f"served: {MODEL}"):
            client.embeddings.create(model="text-embedding-3-small", input=uri(pictures[0]))
        with pytest.raises(openai.UnprocessableEntityError, match=r"input\[1\]: the image is not base64"):
            client.embeddings.create(model=MODEL, input=[uri(pictures[0]), "a red ball"])


def test_images_come_in_the_shapes_that_others_use(caller: Caller, pictures: list[bytes]) -> None:
    image = uri(pictures[0])
    shapes = [
        {"type": "image_url", "image_url": {"url": image}},
        {"type": "input_image", "image_url": image},
        {"image": image.partition(",")[2]},
        {"data": image},
    ]
    reply = caller.json("/v1/embeddings", model=MODEL, input=shapes)
    assert reply.status == 200
    vectors = [entry["embedding"] for entry in reply.value["data"]]
    assert all(vector == pytest.approx(vectors[0], abs=1e-5) for vector in vectors)


@pytest.mark.parametrize(
    ("values", "status", "said"),
    [
        ({"model": MODEL}, 400, "input: Field required"),
        ({"input": "x"}, 400, "model: Field required"),
        ({"model": MODEL, "input": []}, 400, "send an image at least"),
        ({"model": MODEL, "input": [[1, 2]]}, 400, "list is no image"),
        ({"model": MODEL, "input": 3}, 400, "int is no image"),
        ({"model": MODEL, "input": "x", "dimensions": 7}, 400, "gives 256"),
        ({"model": MODEL, "input": "x", "encoding": "float"}, 400, "encoding: Extra inputs"),
        ({"model": MODEL, "input": ["x"] * 300}, 413, "the limit is 256"),
        ({"model": MODEL, "input": "hello world"}, 422, "not base64"),
        ({"model": MODEL, "input": "https://example.org/a.png"}, 403, "URLs are not fetched here"),
    ],
)
def test_what_is_wrong_is_said(caller: Caller, values: dict[str, object], status: int, said: str) -> None:
    reply = caller.json("/v1/embeddings", **values)
    assert (reply.status, said in reply.error[1]) == (status, True), reply.body
    assert caller.post("/v1/embeddings", b"x", "text/plain").status == 415
