import numpy as np
import pytest

from fedjax_cluster.report.similarity_matrix import similarity_matrix


def test_similarities_stand_in_the_order_of_clusters(check_layout):
    labels = np.asarray([1, 0, 1, 0, -1, 0])
    similarity = np.where(labels[:, None] == labels, 0.8, -0.4)
    figure = similarity_matrix(similarity, labels, group=[1, 0, 1, 2, 0, 0])
    axes = figure.axes[0]
    expected = np.kron([[1, 0], [0, 1]], np.ones((3, 3)))[:5, :5]
    assert (np.asarray(axes.images[0].get_array()) > 0).tolist() == (expected > 0).tolist()
    assert [text.get_text() for text in axes.get_yticklabels()] == ["1", "5", "3", "0", "2"]
    check_layout(figure)


@pytest.mark.parametrize(
    ("similarity", "labels", "group", "message"),
    [
        (np.eye(3), np.zeros(2), None, "must be \\[M, M\\]"),
        (np.eye(2), np.zeros(2), np.zeros(3), "both must be"),
        (np.eye(2), np.full(2, -1), None, "no client has a cluster"),
    ],
)
def test_what_cannot_be_ordered_is_refused(similarity, labels, group, message):
    with pytest.raises(ValueError, match=message):
        similarity_matrix(similarity, labels, group)


def test_clients_have_their_own_numbers():
    """Fault: landmark 37 of a hundred clients is called 1."""
    figure = similarity_matrix(np.eye(3), np.array([1, 0, 0]), index=[37, 4, 90])
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["4", "90", "37"]
