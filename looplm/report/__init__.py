"""Numbers in, one self-contained HTML page and terminal tables out.

Reading order: `schema` (what a report holds; `report.json`) -> `assemble` (from recorded passes to the schema) ->
`verdicts` (what the numbers say, in a sentence) -> `tables`, `plots` -> `sample`, `sections`, `html` (the page) and
`terminal`.
"""
