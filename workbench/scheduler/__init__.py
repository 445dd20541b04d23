"""Who runs where and when: pure functions of the store's records."""
