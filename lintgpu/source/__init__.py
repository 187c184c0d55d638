"""Read files as text with spans: one reader a language, suppressions, edits."""
