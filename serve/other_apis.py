"""Chats that came as a request of another API, whose fields and messages have other names."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from hotsplit.serve.api_error import ApiError
from hotsplit.serve.chat_requests import chat_request
from hotsplit.serve.served_model import ServedModel
from hotsplit.serve.text_requests import TextRequest
from hotsplit.serve.texts import Arrival

_MESSAGE = re.compile(r"\bmessages\[(\d+)\](\.content\b)?")


def translated(
    chat: Mapping[str, object],
    served: ServedModel,
    arrival: Arrival,
    *,
    places: Sequence[str],
    params: Mapping[str, str],
) -> TextRequest:
    """The request of a chat. Raises ApiError in the words of the other API."""
    with in_its_words(places, params):
        return chat_request(chat, served, arrival)


@contextmanager
def in_its_words(places: Sequence[str], params: Mapping[str, str]) -> Iterator[None]:
    """Renames what an ApiError of a chat is about: `places` are those of the chat's messages in the
    other API, `params` the names of its fields."""
    try:
        yield
    except ApiError as error:

        def place_of(found: re.Match[str]) -> str:
            number = int(found[1])  # maybe one in a quoted value, which is no place
            if number >= len(places):
                return found[0]
            is_field = "[" not in places[number]  # whose value is the whole content
            return places[number] + ("" if is_field else found[2] or "")

        def named(text: str) -> str:
            return _MESSAGE.sub(place_of, text)

        param = None if error.param is None else named(params.get(error.param, error.param))
        raise ApiError(
            error.status, named(error.message), error.code, param=param, headers=error.headers
        ) from error
