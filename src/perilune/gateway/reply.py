"""An answer in one piece."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from perilune.gateway.rsgi import HeaderList, HttpProtocol

JSON = ("content-type", "application/json")


class Reply(NamedTuple):
    status: int
    headers: HeaderList
    body: bytes

    def send(self, proto: HttpProtocol, more_headers: HeaderList) -> None:
        proto.response_bytes(self.status, [*self.headers, *more_headers], self.body)


def json_reply(value: Any, status: int = 200) -> Reply:
    return Reply(status, [JSON], msgspec.json.encode(value))
