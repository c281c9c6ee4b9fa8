"""What a text has to match for each `format` of JSON Schema that is enforced.

Each accepts no more than its standard does: RFC 3339 (dates and times; durations in its appendix
A), RFC 5321 (mail), RFC 1123 (host names), RFC 3986 (addresses, URIs), RFC 9562 (UUIDs).
"""

from __future__ import annotations

from collections.abc import Mapping

_DATE = (
    r"[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
"""Without February 29, which only some years have."""
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?"
    r"(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_DURATION = (
    r"P(?:[0-9]{1,9}W|(?:[0-9]{1,9}Y(?:[0-9]{1,9}M(?:[0-9]{1,9}D)?)?"
    r"|[0-9]{1,9}M(?:[0-9]{1,9}D)?|[0-9]{1,9}D)(?:T{t})?|T{t})"
).replace(
    "{t}",
    r"(?:[0-9]{1,9}H(?:[0-9]{1,9}M(?:[0-9]{1,9}S)?)?|[0-9]{1,9}M(?:[0-9]{1,9}S)?|[0-9]{1,9}S)",
)
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,20}[A-Za-z0-9])?"
_HOSTNAME = rf"{_LABEL}(?:\.{_LABEL}){{0,8}}"
"""Short enough for the 255 characters that a name may have."""
_ATEXT = r"[A-Za-z0-9!#$%&'*+=?^_`{|}~/-]"
_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
_GROUP = r"[0-9A-Fa-f]{1,4}"
_IPV6 = "|".join(
    [rf"(?:{_GROUP}:){{7}}{_GROUP}", rf"(?:{_GROUP}:){{1,7}}:", rf":(?::{_GROUP}){{1,7}}", "::"]
    + [rf"(?:{_GROUP}:){{1,{left}}}(?::{_GROUP}){{1,{7 - left}}}" for left in range(1, 7)]
)
_UNRESERVED = r"[A-Za-z0-9._~!$&'()*+,;=:@-]"
_PCHAR = rf"(?:{_UNRESERVED}|%[0-9A-Fa-f]{{2}})"
_URI = (
    rf"[A-Za-z][A-Za-z0-9+.-]{{0,20}}://{_HOSTNAME}(?::[0-9]{{1,5}})?"
    rf"(?:/{_PCHAR}*)*(?:\?(?:{_PCHAR}|[/?])*)?(?:#(?:{_PCHAR}|[/?])*)?"
)
"""With an authority, as nearly all have that are asked for."""

FORMATS: Mapping[str, str] = {
    "date-time": rf"{_DATE}T{_TIME}",
    "time": _TIME,
    "date": _DATE,
    "duration": _DURATION,
    "email": rf"{_ATEXT}{{1,64}}(?:\.{_ATEXT}{{1,20}}){{0,4}}@{_HOSTNAME}",
    "hostname": _HOSTNAME,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}",
    "uri": _URI,
}
