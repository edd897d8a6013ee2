"""The HTTP layer: application, middleware, keys, bodies, event streams, errors. Knows no route's content."""
