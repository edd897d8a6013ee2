"""Tool calls: the tools of a request, parsers of the formats of calls, and grammars that enforce them."""
