package activity

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
