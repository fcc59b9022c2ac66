"""What the figures of the laboratory share: colours, panels of series, files that stay the same."""
