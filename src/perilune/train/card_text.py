"""The words of the card, apart from its numbers."""

from __future__ import annotations

HEAD = """
# nano

A language model with the whole Kimi K3 architecture at laptop size: KDA and gated MLA layers 3:1,
Block Attention Residuals, latent mixture of experts with SiTU, MXFP4 expert weights, K3's chat
format and control tokens. Trained from scratch for this repository; no weight of another model is
in it. It is here so that every part of perilune runs on a real checkpoint, from the first command.

Weights and card: Apache-2.0. This page is written by `python -m perilune.train.card`.
"""

USE = """
## What it is for, and what not

- For trying out, testing and measuring software for models of this kind; for looking inside one.
- It chats in simple English, writes small pieces of Python, tries sums, calls tools in the forms it
  was shown, and answers as JSON when asked. All of it unreliably.
- **Its facts cannot be trusted.** Most chat text it learned from was written by a 135 M parameter
  model that invents things, and nano is smaller still.
- English only. It has had no safety training; do not put it in front of people who expect advice.
- It repeats the biases of its sources, which include the King James Bible and Shakespeare.
"""

RUN = """
## How it was trained

`perilune train {name}`: {steps:,} steps of {rows} rows of {row_len:,} tokens ({tokens} tokens) in
{minutes} minutes on one {device} (torch {torch}), compilation included. Muon for matrices, AdamW
for the rest, experts balanced by quantile balancing alone, experts' forward through MXFP4 in the
last {qat} of the steps. The mean training loss of the last ten logged steps is {loss} nats a token.

{mixture}

{optim}

![Training loss, balance and validation](curve.png)

{earlier}The record of the run is in `metrics.jsonl` and `run.json`. The chat text (see below)
is not distributed with this repository, so the same weights cannot be made again from it alone.
"""

EARLIER = """\
The run was made by an earlier form of this trainer, with the same model, loss and data. In the
recipe of today: {changed}.

The schedule was a cosine, and its length was fixed from the measured speed while the run went on
(3,000 steps until step 40, 2,457 until step 400); padding tokens, few in packed rows, were counted
in balancing; validation ran once, at the end.

"""

SCORES = """
## Validation

Bits per byte of held-out text, beside general compressors that see the whole text of a kind at
once. Documents are split by content, conversations by their first prompt.

{table}

The model's bits include every token of the chat markup, which the bytes leave out; a document's
first token is given, and documents are read in pieces of at most 1,024 tokens, each without what
stands before it. Measured at the end of training, in bf16 with MXFP4 experts. Chat and synthetic
text are made by programs and by a small model, and so are easy to predict; prose and code tell
more.
"""

SOURCES = """
## Sources

Everything comes from ordinary Debian and PyPI packages under permissive licences, or was made for
this model. Large sources are cut: the table tells what was kept, before exact duplicates were
removed. `smollm2-chat` was written by SmolLM2-135M-Instruct (Apache-2.0) on seeded prompts;
`synthetic` is made by `perilune.train.synthetic`: sums, tool calls, JSON, recall.

{table}
"""

ORIGIN = {
    "debian": "Debian 12",
    "pypi": "PyPI",
    "files": "made for this model",
    "interpreter": "CPython",
}

SAMPLES = """
## Ten samples

The prompts and seeds are fixed in `perilune.train.samples`; these are the first and only answers.
Temperature 0.7, top-p 0.95, at most 160 tokens. Capitals, the weather tool, small Python functions
and greetings are among what the synthetic text drills.

"""
