"""The embedded pair: where its files are. PROVENANCE.md beside this file tells how they were made."""

from pathlib import Path

EMBEDDED = Path(__file__).resolve().parent / "embedded"
TARGET, DRAFT = EMBEDDED / "target", EMBEDDED / "draft"
HEADS = EMBEDDED / "heads"  # one trained head per task
