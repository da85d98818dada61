"""Answers /v1/embeddings: pooled hidden states after the last norm, as vectors of length 1.

How they are pooled is the model's word: a GGUF's `pooling_type`, or sentence-transformers'
1_Pooling/config.json beside a checkpoint. If it says nothing, as chat models do, it is the mean.

Letters: D hidden size."""

import base64
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from hotsplit.serve.api_error import ApiError, wrong
from hotsplit.serve.exchange import JsonResponse, while_there
from hotsplit.serve.request_body import RequestBody, Whole, checked
from hotsplit.serve.served_model import ServedModel
from hotsplit.serve.service import Service
from hotsplit.serve.text_requests import check_room, prompts_of
from hotsplit.serve.texts import Arrival, EmbeddingJob, Ended, Report

log = logging.getLogger("hotsplit.serve")
MAX_INPUTS = 2048  # as OpenAI's


class EmbeddingsBody(RequestBody):
    ignored: ClassVar = frozenset({"model", "user"})
    input: object = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[Whole, Field(ge=1)] | None = None


@dataclass(frozen=True, kw_only=True)
class EmbeddingRequest:
    jobs: Sequence[EmbeddingJob]
    num_dimensions: int
    is_base64: bool


async def embeddings(service: Service, request: Request) -> Response:
    arrival = service.arrival()
    fields = await service.fields(request)
    served = service.served
    asked = await service.prepared(lambda: embedding_request(fields, served, arrival))
    exchange = service.exchange(asked.jobs, is_stream=False)
    found: dict[int, tuple[np.ndarray, Report]] = {}

    async def collect() -> None:
        async for batch in exchange.batches():
            for number, event in batch:
                assert isinstance(event, Ended) and event.vector_D is not None
                found[number] = (event.vector_D, event.report)

    try:
        await while_there(request.receive, collect())
    finally:
        exchange.cancel()
    vectors, reports = zip(*(found[number] for number in sorted(found)), strict=True)
    service.report(request, reports)
    num_tokens = sum(report.prompt_tokens for report in reports)
    return await service.prepared(
        lambda: JsonResponse(
            {
                "object": "list",
                "data": [_entry(asked, n, vector_D) for n, vector_D in enumerate(vectors)],
                "model": served.name,
                "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
            }
        )
    )


def embedding_request(
    values: Mapping[str, object], served: ServedModel, arrival: Arrival
) -> EmbeddingRequest:
    """The request of /v1/embeddings. Raises ApiError."""
    body = checked(EmbeddingsBody, values)
    prompts = prompts_of(body.input, served, "input", MAX_INPUTS)
    if body.dimensions is not None and body.dimensions > served.hidden_size:
        line = f"dimensions is {body.dimensions}, wanted at most {served.hidden_size}"
        raise wrong("dimensions", line)
    if served.pooling is None:
        _say_mean(served.name)
    deadline, _ = arrival.deadline()
    pooling = served.pooling or "mean"
    for _, ids in prompts:
        check_room(served, ids, "input", "a text of input has {}")
    return EmbeddingRequest(
        jobs=[EmbeddingJob(ids=ids, pooling=pooling, deadline=deadline) for _, ids in prompts],
        num_dimensions=body.dimensions or served.hidden_size,
        is_base64=body.encoding_format == "base64",
    )


@cache
def _say_mean(name: str) -> None:
    log.warning(
        "%s does not say how its hidden states become an embedding, so it is their mean; models"
        " that are not trained for embeddings tell texts apart poorly",
        name,
    )


def _entry(asked: EmbeddingRequest, index: int, pooled_D: np.ndarray) -> dict[str, object]:
    """OpenAI's object. The first dimensions of a vector have length 1 again (Kusupati 2022)."""
    vector_D = pooled_D[: asked.num_dimensions]
    length = float(np.linalg.norm(vector_D))
    if not (np.isfinite(length) and length > 0):
        raise ApiError(
            500, f"the hidden states of input {index} have the length {length}", "internal_error"
        )
    unit_D = (vector_D / length).astype("<f4")
    encoded = base64.b64encode(unit_D.tobytes()).decode() if asked.is_base64 else unit_D.tolist()
    return {"object": "embedding", "index": index, "embedding": encoded}
