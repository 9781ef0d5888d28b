"""The Ascend backend, written in TileLang's Ascend dialect."""
