package engineroom

// all are the pages, in the order of the navigation.
func (room *Room) all() []page {
	return []page{
		room.approvalsPage(), room.approvalPage(),
		room.automationsPage(), room.automationPage(),
		room.lanesPage(),
	}
}
