"""Tool calls: the tools of a request, parsers of the formats in which models write calls, and grammars that enforce them."""
