"""The page, in Chromium; ``make test-ui`` runs these tests."""
