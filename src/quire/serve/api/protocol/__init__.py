"""The bodies of requests and responses, as msgspec Structs."""
