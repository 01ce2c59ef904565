"""The laboratory: studies, rivals, audits and fuzzers, which need more than a user repeats."""
