package engineroom

// all are the pages, in the order of the navigation.
func (room *Room) all() []page {
	return []page{
		room.lanesPage(),
	}
}
