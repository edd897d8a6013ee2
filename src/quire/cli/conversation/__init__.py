"""The parts of `quire chat`: conversation, slash commands, sources of answers, and the terminal."""
