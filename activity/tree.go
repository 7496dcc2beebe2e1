package activity

import "slices"

// Node is an activity with its children.
type Node struct {
	Row
	Children []*Node `json:"children,omitempty"`
}

// Tree arranges the rows of a trace by parent, and keeps their order among siblings. A row without its parent, or in
// a cycle (plain SQL may write one), stands at the top. So every row appears exactly once.
func Tree(rows []Row) []*Node {
	nodes := make(map[string]*Node, len(rows))
	for i := range rows {
		nodes[rows[i].ID] = &Node{Row: rows[i]}
	}
	parents := make(map[string]string, len(rows))
	var top []*Node
	for i := range rows {
		node := nodes[rows[i].ID]
		parent := parentOf(rows[i])
		if nodes[parent] == nil || descends(parents, parent, node.ID) {
			top = append(top, node)
			continue
		}
		parents[node.ID] = parent
		nodes[parent].Children = append(nodes[parent].Children, node)
	}
	return top
}

// parentOf is the id of a row's parent; empty for none.
func parentOf(row Row) string {
	if row.ParentID == nil {
		return ""
	}
	return *row.ParentID
}

// descends reports whether id is ancestor or below it.
func descends(parents map[string]string, id, ancestor string) bool {
	for ; id != ""; id = parents[id] {
		if id == ancestor {
			return true
		}
	}
	return false
}

// withChildren returns the activities and a row for each child execution, by their beginning. The activities of a child
// are below its row. That is below the last activity of the parent that had begun and not ended, or below the parent.
func (t Trace) withChildren() []Row {
	all := slices.Clone(t.Activities)
	children := make(map[string]bool, len(t.Children))
	for _, c := range t.Children {
		children[c.ID] = true
		row := Row{
			ID: c.ID, ExecutionID: &c.ParentID, SkillName: "execution of " + c.Flow, Status: Status(c.Status),
			CreatedAt: c.CreatedAt, FinishedAt: c.CompletedAt,
		}
		if c.CompletedAt != nil {
			row.DurationMS = new(c.CompletedAt.Sub(c.StartedAt).Milliseconds())
		}
		all = append(all, row)
	}
	slices.SortStableFunc(all, func(a, b Row) int { return a.CreatedAt.Compare(b.CreatedAt) })
	begun := map[string][]Row{} // the activities of each execution, without ended ones at the end of a list
	for i := range all {
		row := &all[i]
		if row.ExecutionID == nil {
			continue
		}
		x := *row.ExecutionID
		if !children[row.ID] {
			if row.ParentID == nil && children[x] {
				row.ParentID = &x
			}
			begun[x] = append(begun[x], *row)
			continue
		}
		within := begun[x]
		for n := len(within); n > 0 && within[n-1].FinishedAt != nil && within[n-1].FinishedAt.Before(row.CreatedAt); n-- {
			within = within[:n-1]
		}
		if begun[x] = within; len(within) > 0 {
			row.ParentID = &within[len(within)-1].ID
		} else if children[x] {
			row.ParentID = &x
		}
	}
	return all
}
