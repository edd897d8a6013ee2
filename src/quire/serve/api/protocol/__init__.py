"""What requests and responses look like on the wire: one msgspec Struct each."""
