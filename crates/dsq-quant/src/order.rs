//! The order of a matrix's columns where the groups of its scales are no runs of inputs (*act-order*, `desc_act` of GPTQ, Frantar et
//! al., arXiv:2210.17323, in its authors' code): codes are kept with the columns of a group side by side, as every grid and kernel
//! here wants them, and this says which input each column is. Not the codes (see `matrix.rs`), not the files.

/// Which input each column of a matrix is: a permutation of `0..k` by construction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ColumnOrder(Vec<u32>);

impl ColumnOrder {
    /// The order that puts the columns of each group side by side, those of one group in the order of the inputs: from the group of
    /// each input, `[k]` (`g_idx`).
    pub fn from_groups(groups: &[usize]) -> Self {
        let mut order: Vec<u32> = (0..groups.len() as u32).collect();
        order.sort_by_key(|&i| groups[i as usize]);
        Self(order)
    }

    /// The order of `k` columns that are the inputs as they come.
    pub fn identity(k: usize) -> Self {
        Self((0..k as u32).collect())
    }

    /// Whether column `j` is input `j` throughout.
    pub fn is_identity(&self) -> bool {
        self.0.iter().enumerate().all(|(j, &i)| i as usize == j)
    }

    /// Columns.
    pub fn k(&self) -> usize {
        self.0.len()
    }

    /// The input that each column is, `[k]`.
    pub fn inputs(&self) -> &[u32] {
        &self.0
    }

    /// The group of each input, `[k]`, where `group_len` columns side by side are a group.
    pub fn groups(&self, group_len: usize) -> Vec<usize> {
        let mut groups = vec![0; self.0.len()];
        for (j, &i) in self.0.iter().enumerate() {
            groups[i as usize] = j / group_len.max(1);
        }
        groups
    }

    /// Rows `[.., k]` of inputs as the columns see them: value `j` of a row is that of input `inputs()[j]`.
    pub fn gather<T: Copy>(&self, rows: &[T]) -> Vec<T> {
        let mut out = Vec::with_capacity(rows.len());
        self.gather_into(rows, &mut out);
        out
    }

    /// [`ColumnOrder::gather`] in the place of what `out` holds.
    pub fn gather_into<T: Copy>(&self, rows: &[T], out: &mut Vec<T>) {
        out.clear();
        for row in rows.chunks_exact(self.0.len().max(1)) {
            out.extend(self.0.iter().map(|&i| row[i as usize]));
        }
    }

    /// Rows `[.., k]` of columns as inputs: undoes [`ColumnOrder::gather`].
    pub fn scatter<T: Copy>(&self, rows: &[T]) -> Vec<T> {
        let mut out = rows.to_vec();
        let k = self.0.len().max(1);
        for (to, from) in out.chunks_exact_mut(k).zip(rows.chunks_exact(k)) {
            self.0.iter().zip(from).for_each(|(&i, &v)| to[i as usize] = v);
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_of_a_group_lie_side_by_side_and_come_back() {
        let groups = [1, 0, 2, 0, 1, 2];
        let order = ColumnOrder::from_groups(&groups);
        assert_eq!((order.inputs(), order.k()), (&[1, 3, 0, 4, 2, 5][..], 6));
        assert_eq!(order.groups(2), groups);
        let rows: Vec<i32> = (0..12).collect();
        let columns = order.gather(&rows);
        assert_eq!(columns[..6], [1, 3, 0, 4, 2, 5]);
        assert_eq!(order.scatter(&columns), rows);
        assert!(!order.is_identity() && ColumnOrder::identity(6).is_identity());
        assert_eq!(ColumnOrder::from_groups(&[0, 0, 1, 1]), ColumnOrder::identity(4));
    }
}
