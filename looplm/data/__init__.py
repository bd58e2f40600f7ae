"""Text in, batches of token ids out: what a run reads, and how it is cut.

Imports nothing of the package but its errors; transformers is imported inside the one function that needs it.

Reading order: `documents` (a named text; train and held-out) -> `stdlib_text` (the offline default corpus) and
`text_files` (the user's own files) -> `tokenizer` -> `packing` (training batches, resumable to the token) ->
`evaluation_windows` (held-out batches, for bits per byte by document).
"""
