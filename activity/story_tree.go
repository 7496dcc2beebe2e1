package activity

// Node is an activity with those that were filed under it.
type Node struct {
	Row
	Children []*Node `json:"children,omitempty"`
}

// Tree arranges the rows of a trace by their parents and keeps their order among siblings. A row whose
// parent is not among them stands at the top, as does one whose ancestors lead back to itself (anybody
// may write rows by SQL), so every row appears exactly once.
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

// parentOf is the id of a row's parent; empty when it has none.
func parentOf(row Row) string {
	if row.ParentID == nil {
		return ""
	}
	return *row.ParentID
}

// descends reports whether id is ancestor or stands below it.
func descends(parents map[string]string, id, ancestor string) bool {
	for ; id != ""; id = parents[id] {
		if id == ancestor {
			return true
		}
	}
	return false
}
