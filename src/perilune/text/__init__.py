"""Text: tokenizers, chat encodings, parsers of model output, detokenizer, stop strings.

Everything here starts without torch. The way of a chat turn: `load.load_tokenizer` and
`load.load_chat_format` once, then `ChatFormat.encode` (messages to ids) and `ChatFormat.parser`
(ids back to reasoning, text and tool calls).
"""
