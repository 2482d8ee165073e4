"""All that a run needs from its settings: workers, plans, folder and stopping."""
