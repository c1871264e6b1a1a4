"""What a run shows: metrics, spans, samples, progress, log, report. Imports neither torch nor an engine."""
