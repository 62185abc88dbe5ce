"""FedGWC's Eqs. 1, 3 and 4, entry by entry."""

import numpy as np


def gaussian_rewards(losses: np.ndarray) -> np.ndarray:
    losses = np.asarray(losses, np.float64)
    num_clients, num_steps = losses.shape
    rewards = np.zeros(num_clients)
    for step in range(num_steps):
        mean = losses[:, step].mean()
        variance = losses[:, step].var(ddof=1) if num_clients > 1 else 0.0
        for client in range(num_clients):
            if variance == 0.0:
                rewards[client] += 1.0
            else:
                rewards[client] += np.exp(-((losses[client, step] - mean) ** 2) / (2 * variance))
    return rewards / num_steps


def update_interactions(interactions, rewards, clients, rate) -> np.ndarray:
    updated = np.array(interactions, np.float64)
    for a, k in enumerate(clients):
        for b, j in enumerate(clients):
            alpha = rate if np.ndim(rate) == 0 else rate[a][b]
            updated[k, j] = (1 - alpha) * interactions[k, j] + alpha * rewards[a]
    return updated


def interaction_affinity(interactions: np.ndarray, beta: float) -> np.ndarray:
    interactions = np.asarray(interactions, np.float64)
    affinity = np.ones_like(interactions)
    for k in range(len(interactions)):
        for j in range(len(interactions)):
            if k != j:
                unbiased_k = np.delete(interactions[k], [k, j])
                unbiased_j = np.delete(interactions[j], [j, k])
                affinity[k, j] = np.exp(-beta * ((unbiased_k - unbiased_j) ** 2).sum())
    return affinity
