"""Driver side: the manager runs synchronizations by calling handles of sender and receivers."""
